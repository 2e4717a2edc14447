"""Products of several tokens with int8 weights in rows, on Hopper's tensor cores.

As in `several.py`, but that rows pass through shared memory, for a thread wants 16 bytes of each of
four rows, of which its memory requests would be too small.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton.gluon_names import (
    along,
    barrier,
    copy_ahead,
    inputs_are_there,
    next_may_begin,
)
from hmt.kernels.triton.several_results import rows_of, write_sums

STEP = gl.constexpr(128)  # inputs


# Constants, besides those of `several_tokens`:
#
# CHUNK_ROWS  as in `few_tokens_rows`, a multiple of 32 WARPS
# WORDS       `word_layout`
@gluon.jit
def several_tokens_rows(
    out, x, token_scales, codes, scales, bias, rows, columns, tokens, x_stride, out_stride,
    CHUNK_ROWS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, ADD: gl.constexpr, WORDS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """x bf16 or int8 [tokens, in] times int8 [rows, in]: program (tile, part of inputs, tokens)."""
    next_may_begin(DEPENDENT)
    ROWS: gl.constexpr = 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    tile = gl.program_id(0)
    first_token = gl.program_id(2) * TOKENS
    steps = gl.cdiv(columns, STEP)
    first = steps * gl.program_id(1) // SPLIT
    last = steps * (gl.program_id(1) + 1) // SPLIT
    before = 0
    if CHUNK_ROWS > 0:
        which = tile * ROWS // CHUNK_ROWS
        before = which * CHUNK_ROWS
        codes = gl.load(codes + which).to(gl.pointer_type(gl.int8))
        scales = gl.load(scales + which).to(gl.pointer_type(gl.float32))
    row = gl.minimum(tile * ROWS + along(ROWS, 0, COPY), rows - 1) - before
    word = along(STEP // 4, 1, COPY)
    codes = gl.multiple_of(codes.to(gl.pointer_type(gl.int32)), 16)
    total = _sum_of_steps(
        codes, row * (columns // 4) + word, word, x, first, last, columns, first_token, tokens,
        x_stride, STAGES, TOKENS, WARPS, WORDS, MMA, DEPENDENT,
    )  # fmt: skip
    its = tile * ROWS + rows_of(WARPS, MMA)
    total *= gl.load(scales + (its - before), mask=its < rows, other=0.0) * 64
    if token_scales is not None:
        token = first_token + along(TOKENS, 1, MMA)
        total *= gl.load(token_scales + token, mask=token < tokens, other=0.0)
    write_sums(
        out, total, bias, None, tile, rows, 0, rows, first_token, tokens, out_stride,
        WARPS, TOKENS, SPLIT, ADD, MMA,
    )  # fmt: skip


@gluon.jit
def _sum_of_steps(
    codes, code_at, word, x, first, last, columns, first_token, tokens, x_stride,
    STAGES: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr,
    MMA: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sums [32 WARPS, TOKENS] over steps first to last; code_at: of words of step 0."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, STEP // 4], LINES)
    PAIR: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, STEP], PAIR)
    for ahead in gl.static_range(STAGES - 1):
        begin = (first + ahead) * (STEP // 4)
        end = gl.where(first + ahead < last, columns // 4, 0)
        _fetch(ring.index(ahead), codes, code_at + begin, word + begin, end)
        async_copy.commit_group()

    inputs_are_there(DEPENDENT)
    token = first_token + along(TOKENS, 0, X)
    k = along(STEP, 1, X)
    x_at = x + token.to(gl.int64) * x_stride + k
    known = token < tokens
    end = gl.minimum(columns, last * STEP)
    values = gl.load(x_at + first * STEP, mask=known & (first * STEP + k < end), other=0)
    inputs.index(0).store(_by_words(values, TOKENS))
    total = gl.zeros([32 * WARPS, TOKENS], gl.float32, layout=MMA)
    slot, half = 0, 0
    for step in range(first, last):
        following = (step + 1) * STEP
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # waits for what the thread has loaded: the next inputs come later
        barrier()
        values = gl.load(x_at + following, mask=known & (following + k < end), other=0)
        free = gl.where(slot == 0, STAGES, slot) - 1  # all have left the step before
        later = (step + (STAGES - 1)) * (STEP // 4)
        copied = gl.where(step + (STAGES - 1) < last, columns // 4, 0)
        _fetch(ring.index(free), codes, code_at + later, word + later, copied)
        async_copy.commit_group()
        for part in gl.static_range(2):
            words = ring.index(slot).slice(part * 16, 16, 1).load(WORDS)
            weights = _weights(words, OPERAND, WARPS)
            there = inputs.index(half).slice(part * 64, 64, 1).permute((1, 0))
            total = warpgroup_mma(weights, there, total, is_async=True)
        inputs.index(1 - half).store(_by_words(values, TOKENS))
        total = warpgroup_mma_wait(0, deps=(total,))
        half = 1 - half
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    async_copy.wait_group(0)
    return total


def word_layout(warps: int) -> gl.DistributedLinearLayout:
    """Of words [32 warps, 16]: a thread has four of each of four rows."""
    registers = [[0, 1], [0, 2], [1, 0], [2, 0]]
    lanes = [[0, 4], [0, 8], [4, 0], [8, 0], [16, 0]]
    across = [[32 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [32 * warps, 16])


@gluon.jit
def _fetch(slot, codes, at, word, end):
    at, word = gl.broadcast(at, word)
    copy_ahead(slot, codes + at, mask=word < end)


@gluon.jit
def _by_words(values, TOKENS: gl.constexpr):
    """Inputs [TOKENS, STEP] in bf16, in the order of `_weights`."""
    # 64 inputs, quarter of them, word, pair, of two
    values = gl.reshape(values.to(gl.bfloat16), (TOKENS, STEP // 64, 4, 4, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 3, 4, 2, 5)), (TOKENS, STEP))


@gluon.jit
def _weights(words, OPERAND: gl.constexpr, WARPS: gl.constexpr):
    """Words [32 WARPS, 16]: 2^-6 of their bytes, [32 WARPS, 64], rows as `rows_of`."""
    a, b = _int8_numbers(words)
    both = gl.join(_pair(a), _pair(b))
    # warp, of 8, two rows of 64, of 8, quarter, word, of two, pair
    both = gl.reshape(both, (WARPS, 8, 2, 2, 4, 4, 2, 2))
    both = gl.permute(both, (2, 0, 3, 1, 5, 7, 4, 6))
    return gl.convert_layout(gl.reshape(both, (32 * WARPS, 64)), OPERAND, assert_trivial=True)


@gluon.jit
def _pair(word):
    low = word.to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, (word >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))


@gluon.jit
def _int8_numbers(words):
    """2^-6 of bytes 0 and 1, 2 and 3, in bf16, in whose lowest bits numbers are 2^-133 of them."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 m, n;
        xor.b32 $1, $2, 0x80808080;
        prmt.b32 $0, $1, 0, 0x4140;
        prmt.b32 $1, $1, 0, 0x4342;
        mov.b32 m, 0x7F007F00;
        mov.b32 n, 0xC000C000;
        fma.rn.bf16x2 $0, $0, m, n;
        fma.rn.bf16x2 $1, $1, m, n;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
