"""Products of up to 16 tokens with weights of f16 or bf16 in rows, on tensor cores.

A tensor core takes 8 columns of inputs at once, whether or not all are there: more tokens cost
hardly more than one, and a token's sums are the same beside any others.  So a step that verifies
draft tokens takes hardly longer than one without.  Microseconds on an H200, by tokens, with 28672
rows of 4096 inputs (here 1 and 4; on the ordinary units, see `gemv_float`, 1, 2 and 4): 56.7, 58.8;
57.4, 62.4, 87.4; with 4096 rows of 14336: 31, 33; 29, 46, 71.

Weights go from memory to the registers that tensor cores read.  There a lane holds numbers of one
of 8 rows, 16 bytes at a time, and four lanes share a row: a load would take half a line of each of
8 rows, and the memory is a fifth slower then (72 us).  So a load takes whole lines of four rows:
what tensor cores call a row is half of a line.  Inputs of that half are in four of the columns, and
those of the other half in the others; products of one half with the other are left out at the end.
That does for four tokens.

mma.sync's fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

# ruff: noqa: RUF005 - Triton's tuples are joined by `+`

from collections.abc import Sequence
from itertools import chain
from math import gcd
from operator import is_

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Activations, WeightTensor
from hmt.kernels.triton.device_math import interpreted, rounded
from hmt.kernels.triton.gemm.unpack import ASSEMBLER
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.single_tokens import are_single
from hmt.kernels.weight_cache import WeightCache

_FLOATS = (torch.float16, torch.bfloat16)
_VECTOR_BYTES = 16
_VECTOR = 8  # numbers that a thread loads at once
_ROWS = 8  # of a program
# Of a program, and of 64 columns that a warp takes in a step.  The same for all weights and tokens,
# since the sums of a token are in this order.
_WARPS, _CHUNKS = 8, 4
_TOKENS = 4  # of a product
_MOST_TOKENS = 16
# Of a batch, whose tokens need no bits of their own: with more a library takes less time.
_MOST_OF_A_BATCH = 4
# With fewer rows most multiprocessors would have no program.
_FEWEST_ROWS = 128

_BF16_PRODUCT = tl.constexpr(
    """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $8, $5, $9},
        {$12, $13}, {$16, $17, $18, $19};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$6, $10, $7, $11},
        {$14, $15}, {$0, $1, $2, $3};
    """
)
_F16_PRODUCT = tl.constexpr(_BF16_PRODUCT.value.replace("bf16.bf16", "f16.f16"))


# Constants of the kernel:
#
# PART_ROWS   `weights` are addresses of parts of so many rows, `bias` of theirs
# WARPS       of a program; each takes CHUNKS of 64 columns in a step
# FOURS       fours of tokens
# ADD         products are rounded and added to what lies in `out`
#
# Lane (slot of 8, t of 4) of a warp loads weights of row slot / 2, columns 32 (slot % 2) + 8 t of a
# chunk; and of token slot % 4 inputs of columns 32 (slot / 4) + 8 t.  Of products it holds those of
# its slot with columns 2 t and 2 t + 1: tokens 2 (t % 2) and the next, half t / 2 of a line.
@triton.jit
def few_tokens_mma(
    out, x, weights, bias, rows, columns, tokens, x_row, out_row,
    BF16: tl.constexpr, PART_ROWS: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    FOURS: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [tokens, columns] times weights [rows, columns]."""
    next_may_begin(DEPENDENT)
    STEP: tl.constexpr = WARPS * CHUNKS * 64
    lane = tl.arange(0, WARPS * 32)
    slot = lane // 4 % 8
    first = lane // 32 * (CHUNKS * 64) + lane % 4 * 8
    column = first + slot % 2 * 32
    first_row = tl.program_id(0) * 8
    last_row = rows - 1
    if PART_ROWS > 0:
        part = first_row // PART_ROWS
        last_row = tl.minimum(PART_ROWS, rows - part * PART_ROWS) - 1
        first_row %= PART_ROWS
        weights = tl.load(weights + part).to(tl.pointer_type(x.dtype.element_ty))
        if bias is not None:
            bias = tl.load(bias + part).to(tl.pointer_type(x.dtype.element_ty))
            bias -= part * PART_ROWS
    row = first_row + slot // 2
    upper = _words(weights, tl.minimum(row, last_row).to(tl.int64) * columns + column)
    lower = _words(weights, tl.minimum(row + 4, last_row).to(tl.int64) * columns + column)
    now = _step(upper, lower, column, 0, columns, CHUNKS)
    inputs_are_there(DEPENDENT)
    token, x_column = slot % 4, first + slot // 4 * 32
    inputs = _words(x, token.to(tl.int64) * x_row + x_column)
    totals = (tl.zeros((WARPS * 32,), tl.float32),) * (4 * FOURS)
    for start in range(0, columns, STEP):
        following = _step(upper, lower, column, start + STEP, columns, CHUNKS)
        new = ()
        for four in tl.static_range(FOURS):
            sums = (tl.zeros((WARPS * 32,), tl.float32),) * 4
            for chunk in tl.static_range(CHUNKS):
                at = start + chunk * 64
                mask = (token + four * 4 < tokens) & (x_column + at < columns)
                own = inputs + (x_row.to(tl.int64) * (2 * four) + at // 2)
                values = _apart(tl.load(own, mask=mask[:, None], other=0))
                sums = _product(now[2 * chunk], now[2 * chunk + 1], values, sums, BF16, WARPS)
            # The tensor cores' own sums are of a step only: they are cut off, not rounded.
            for number in tl.static_range(4):
                new = new + (totals[4 * four + number] + sums[number],)  # type: ignore[assignment]
        totals = new
        now = following
    kind: tl.constexpr = out.dtype.element_ty
    at_row = tl.program_id(0) * 8 + _ramp(0, 4) + 4 * _ramp(2, 2)
    for four in tl.static_range(FOURS):
        result = _of_tokens(
            totals[4 * four],
            totals[4 * four + 1],
            totals[4 * four + 2],
            totals[4 * four + 3],
            WARPS,
        )
        at_token = four * 4 + _ramp(1, 2) * 2 + _ramp(3, 2)
        inside = (at_row < rows) & (at_token < tokens)
        if bias is not None:
            result += tl.load(bias + at_row, mask=at_row < rows, other=0.0).to(tl.float32)
        own = out + at_token.to(tl.int64) * out_row + at_row
        if ADD:
            result = rounded(result, kind)
            result += tl.load(own, mask=inside, other=0.0).to(tl.float32)
        tl.store(own, rounded(result, kind).to(kind), mask=inside)


@triton.jit
def _of_tokens(even, odd, lower_even, lower_odd, WARPS: tl.constexpr):
    """Sums of all warps and of both halves of lines: [4 rows, 2 tokens, 4 rows on, 2 tokens]."""
    found = tl.join(tl.join(even, lower_even), tl.join(odd, lower_odd))
    found = tl.reshape(found, (WARPS, 4, 4, 2, 4))  # warp, row, halves of slot and of t, t % 2
    halves = tl.arange(0, 4)[None, None, :, None, None]
    alike = halves // 2 == halves % 2
    return tl.reshape(tl.sum(tl.sum(tl.where(alike, found, 0.0), axis=2), axis=0), (4, 2, 2, 2))


@triton.jit
def _ramp(AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Places along an axis of four."""
    shape: tl.constexpr = (
        SIZE if AXIS == 0 else 1,
        SIZE if AXIS == 1 else 1,
        SIZE if AXIS == 2 else 1,
        SIZE if AXIS == 3 else 1,
    )
    return tl.reshape(tl.arange(0, SIZE), shape)


@triton.jit
def _words(numbers, at):
    """Addresses [lanes, 4] of the words of 8 numbers from each of `at`, multiples of 8."""
    words = tl.multiple_of(numbers.to(tl.pointer_type(tl.int32)), 16)
    return words + (at // 8)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _step(upper, lower, column, start, columns, CHUNKS: tl.constexpr):
    """Words of a step's chunks, of four rows and of the next four; zeros behind the last column."""
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = start + chunk * 64
        mask = (column + at < columns)[:, None]
        one = tl.load(upper + at // 2, mask=mask, other=0)
        other = tl.load(lower + at // 2, mask=mask, other=0)
        found = found + (one, other)  # type: ignore[assignment]
    return found


@triton.jit
def _apart(words):
    """Words [lanes, 4] as four tensors [lanes]."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def _product(upper, lower, x, sums, BF16: tl.constexpr, WARPS: tl.constexpr):
    """Sums of each lane's two rows and two tokens, with 32 columns more."""
    a, b = _apart(upper), _apart(lower)
    if ASSEMBLER:
        CODE: tl.constexpr = _BF16_PRODUCT if BF16 else _F16_PRODUCT
        found = tl.inline_asm_elementwise(
            CODE,
            "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], x[0], x[1], x[2], x[3],
             sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        even, odd = _of_rows(a, x, BF16, WARPS)
        low_even, low_odd = _of_rows(b, x, BF16, WARPS)
        found = (sums[0] + even, sums[1] + odd, sums[2] + low_even, sums[3] + low_odd)
    return found


@triton.jit
def _of_rows(words, x, BF16: tl.constexpr, WARPS: tl.constexpr):
    """What tensor cores give lane (row, t) for tokens 2 t and 2 t + 1, from arithmetic."""
    even = tl.zeros((WARPS, 8, 4), tl.float32)
    odd = even
    for word in tl.static_range(4):
        for half in tl.static_range(2):
            weight = _half(words[word], half, BF16)
            weight = tl.reshape(weight, (WARPS, 8, 1, 4))
            of_tokens = tl.reshape(_half(x[word], half, BF16), (WARPS, 4, 2, 4))
            first, second = tl.split(tl.permute(of_tokens, (0, 1, 3, 2)))
            even += tl.sum(weight * first[:, None, :, :], axis=3)
            odd += tl.sum(weight * second[:, None, :, :], axis=3)
    return tl.reshape(even, (WARPS * 32,)), tl.reshape(odd, (WARPS * 32,))


@triton.jit
def _half(words, HALF: tl.constexpr, BF16: tl.constexpr):
    numbers = (words >> (16 * HALF)).to(tl.int16)
    if BF16:
        found = (numbers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = numbers.to(tl.float16, bitcast=True).to(tl.float32)
    return found


_Parts = tuple[Tensor, Tensor | None, int]
_PARTS: WeightCache[tuple[tuple[WeightTensor | Tensor | None, ...], _Parts]] = WeightCache()


def takes_mma(x: Tensor, w: WeightTensor) -> bool:
    """Whether `multiply_mma` takes x [tokens, in] and w."""
    most = _MOST_TOKENS if are_single() else _MOST_OF_A_BATCH
    if not 0 < len(x) <= most or x.dtype not in _FLOATS or x.stride(1) != 1:
        return False
    if w.data.dtype is not x.dtype or w.activations is not Activations.FLOAT:
        return False
    if w.shape[0] <= _FEWEST_ROWS or w.shape[1] % _VECTOR or not w.encoding.is_float:
        return False
    if w.data.data_ptr() % _VECTOR_BYTES or not w.data.is_contiguous():
        return False
    return interpreted() or (x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 8)


def take_mma_at_once(
    x: Tensor, weights: Sequence[WeightTensor], biases: Sequence[Tensor | None]
) -> int:
    """How many of the first weights `multiply_mma` takes at once, all of which `takes_mma`."""
    w, bias = weights[0], biases[0]
    count = 1 if takes_mma(x, w) else 0
    while 0 < count < len(weights) and weights[count - 1].shape[0] % _ROWS == 0:
        other, added = weights[count], biases[count]
        if other.shape[1] != w.shape[1] or not takes_mma(x, other):
            break
        if (added is None) != (bias is None) or (added is not None and added.dtype != x.dtype):
            break
        count += 1
    return 1 if count > 1 and bias is not None and bias.dtype != x.dtype else count


def multiply_mma(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    add: bool = False,
) -> None:
    """x [tokens, in] times weights, side by side, to out [tokens, rows of all].

    Several are what `take_mma_at_once` says.  With `add`, products are rounded and added to `out`.
    """
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if x.data_ptr() % _VECTOR_BYTES or (len(x) > 1 and x.stride(0) % _VECTOR):
        x = x.clone(memory_format=torch.contiguous_format)
    data, bias, part_rows = weights[0].data, biases[0], 0
    if len(weights) > 1:
        data, bias, part_rows = _parts(weights, biases)
    few_tokens_mma[(triton.cdiv(rows, _ROWS),)](
        out, x, data, bias, rows, columns, len(x), x.stride(0), out.stride(0),
        BF16=x.dtype is torch.bfloat16, PART_ROWS=part_rows,
        WARPS=_WARPS, CHUNKS=_CHUNKS, FOURS=triton.cdiv(len(x), _TOKENS), ADD=add,
        num_warps=_WARPS, **dependent(x.device),
    )  # fmt: skip


def _parts(weights: Sequence[WeightTensor], biases: Sequence[Tensor | None]) -> _Parts:
    """Addresses of parts of all weights and biases, int64, and a part's rows; kept for next calls.

    Made in a first call, before anything is captured.
    """
    given = (*weights[1:], *biases)
    known = _PARTS.get(weights[0])
    if known is not None and len(known[0]) == len(given) and all(map(is_, known[0], given)):
        return known[1]
    size = gcd(*(w.shape[0] for w in weights[:-1]))
    places = [
        [start.data_ptr() + row * step for row in range(0, w.shape[0], size)]
        for w in weights
        for start, step in ((w.data, w.shape[1] * w.data.element_size()),)
    ]
    table = torch.tensor(list(chain(*places))).to(weights[0].data.device)
    added = None
    if biases[0] is not None:
        there = [
            bias.data_ptr() + row * bias.element_size()
            for bias in biases if bias is not None for row in range(0, len(bias), size)
        ]  # fmt: skip
        added = torch.tensor(there).to(table.device)
    found = table, added, size
    _PARTS[weights[0]] = given, found
    return found
