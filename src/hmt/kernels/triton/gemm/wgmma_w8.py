"""Products of several tokens with weights in rows, int8, e4m3 or f16, on Hopper's tensor cores.

As in `several.py`, but that rows pass through shared memory, for a thread wants 16 bytes of each of
four rows, of which its memory requests would be too small.
"""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton.gemm.wgmma_epilogue import rows_of, write_sums
from hmt.kernels.triton.gemm.wgmma_weights import e4m3_pairs, pair_of
from hmt.kernels.triton.gluon_compat import (
    along,
    barrier,
    copy_ahead,
    inputs_are_there,
    next_may_begin,
)

STEP = gl.constexpr(128)  # inputs


# Constants, besides those of `several_tokens`:
#
# CHUNK_ROWS  as in `few_tokens_rows`, a multiple of 32 WARPS
# FORM        what rows are of: "int8" with a scale per row, "e4m3" with one per tile, or "f16"
# TILE_ROWS   rows of a tile, a multiple of 32 WARPS, and TILE_STEPS its steps; 0 for all there are
# WORDS       `word_layout`
# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@gluon.jit(do_not_specialize=["tokens"])
def several_tokens_rows(
    out, x, token_scales, codes, scales, bias, rows, columns, tokens, x_stride, out_stride,
    scale_columns, CHUNK_ROWS: gl.constexpr, FORM: gl.constexpr, TILE_ROWS: gl.constexpr,
    TILE_STEPS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, ADD: gl.constexpr, WORDS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """x bf16 or int8 [tokens, in] times [rows, in]: program (tile, part of inputs, tokens)."""
    next_may_begin(DEPENDENT)
    ROWS: gl.constexpr = 32 * WARPS
    IN_ONE: gl.constexpr = 2 if FORM == "f16" else 4  # numbers of a word
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
    word = along(STEP // IN_ONE, 1, COPY)
    codes = gl.multiple_of(codes.to(gl.pointer_type(gl.int32)), 16)
    tiles = scales
    if FORM == "e4m3" and TILE_ROWS > 0:
        tiles = scales + tile * ROWS // TILE_ROWS * scale_columns
    total = _sum_of_steps(
        codes, row * (columns // IN_ONE) + word, word, x, tiles, first, last, columns, first_token,
        tokens, x_stride, FORM, TILE_STEPS, IN_ONE, STAGES, TOKENS, WARPS, WORDS, MMA, DEPENDENT,
    )  # fmt: skip
    if FORM == "int8":
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
    codes, code_at, word, x, tiles, first, last, columns, first_token, tokens, x_stride,
    FORM: gl.constexpr, TILE_STEPS: gl.constexpr, IN_ONE: gl.constexpr, STAGES: gl.constexpr,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr, MMA: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sums [32 WARPS, TOKENS] over steps first to last; code_at: of words of step 0."""
    ACROSS: gl.constexpr = STEP // IN_ONE  # words
    IN_PART: gl.constexpr = 16 * IN_ONE
    TILED: gl.constexpr = FORM == "e4m3"
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, ACROSS], LINES)
    PAIR: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, STEP], PAIR)
    for ahead in gl.static_range(STAGES - 1):
        begin = (first + ahead) * ACROSS
        end = gl.where(first + ahead < last, columns // IN_ONE, 0)
        _fetch(ring.index(ahead), codes, code_at + begin, word + begin, end)
        async_copy.commit_group()

    inputs_are_there(DEPENDENT)
    token = first_token + along(TOKENS, 0, X)
    k = along(STEP, 1, X)
    x_at = x + token.to(gl.int64) * x_stride + k
    known = token < tokens
    end = gl.minimum(columns, last * STEP)
    values = gl.load(x_at + first * STEP, mask=known & (first * STEP + k < end), other=0)
    inputs.index(0).store(_by_words(values, TOKENS, IN_ONE))
    total = gl.zeros([32 * WARPS, TOKENS], gl.float32, layout=MMA)
    sums = total
    slot, half = 0, 0
    for step in range(first, last):
        following = (step + 1) * STEP
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # waits for what the thread has loaded: the next inputs come later
        barrier()
        values = gl.load(x_at + following, mask=known & (following + k < end), other=0)
        free = gl.where(slot == 0, STAGES, slot) - 1  # all have left the step before
        later = (step + (STAGES - 1)) * ACROSS
        copied = gl.where(step + (STAGES - 1) < last, columns // IN_ONE, 0)
        _fetch(ring.index(free), codes, code_at + later, word + later, copied)
        async_copy.commit_group()
        if TILED:
            which = 0
            if TILE_STEPS > 0:
                which = step // TILE_STEPS
            scale = gl.load(tiles + which)
        for part in gl.static_range(STEP // IN_PART):
            words = ring.index(slot).slice(part * 16, 16, 1).load(WORDS)
            weights = _weights(words, OPERAND, WARPS, FORM)
            there = inputs.index(half).slice(part * IN_PART, IN_PART, 1).permute((1, 0))
            sums = warpgroup_mma(weights, there, sums, use_acc=not TILED or part > 0, is_async=True)
        inputs.index(1 - half).store(_by_words(values, TOKENS, IN_ONE))
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if TILED:
            total += sums * scale
        half = 1 - half
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    async_copy.wait_group(0)
    if not TILED:
        total = sums
    return total


@cache
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
def _by_words(values, TOKENS: gl.constexpr, IN_ONE: gl.constexpr):
    """Inputs [TOKENS, STEP] in bf16, in the order of `_weights`."""
    # 16 words, quarter of them, word, pair, of two
    PAIRS: gl.constexpr = IN_ONE // 2
    values = gl.reshape(values.to(gl.bfloat16), (TOKENS, STEP // (16 * IN_ONE), 4, 4, PAIRS, 2))
    return gl.reshape(gl.permute(values, (0, 1, 3, 4, 2, 5)), (TOKENS, STEP))


@gluon.jit
def _weights(words, OPERAND: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr):
    """Words [32 WARPS, 16] as numbers, of int8 2^-6 of them, rows as `rows_of`."""
    if FORM == "f16":
        both = pair_of(_f16_numbers(words))
        # warp, of 8, two rows of 64, of 8, quarter, word, of two
        both = gl.reshape(both, (WARPS, 8, 2, 2, 4, 4, 2))
        both = gl.permute(both, (2, 0, 3, 1, 5, 4, 6))
        both = gl.reshape(both, (32 * WARPS, 32))
    else:
        a, b = _int8_numbers(words) if FORM == "int8" else e4m3_pairs(words)
        both = gl.join(pair_of(a), pair_of(b))
        # warp, of 8, two rows of 64, of 8, quarter, word, of two, pair
        both = gl.reshape(both, (WARPS, 8, 2, 2, 4, 4, 2, 2))
        both = gl.permute(both, (2, 0, 3, 1, 5, 7, 4, 6))
        both = gl.reshape(both, (32 * WARPS, 64))
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


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


@gluon.jit
def _f16_numbers(words):
    """Two numbers of f16, rounded to bf16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .f32 c, d;
        mov.b32 {a, b}, $1;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        cvt.rn.bf16x2.f32 $0, d, c;
        }
        """,
        "=r,r",
        [words],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
