"""Products of few tokens with weights that are numbers in rows: f32, f16, bf16, or FP8 in tiles.

Reading them is all there is to do, so they are multiplied in f32 as they come, without tensor
cores: no weight is rounded, and what a library's product needs to begin and to end is saved.

Several tokens are for `single_tokens`: each is summed up as it is alone, from weights that are read
once for four of them.
"""

# ruff: noqa: RUF005 - Triton's tuples are joined by `+`

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.triton.device_math import interpreted, rounded
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.single_tokens import are_single

_VECTOR_BYTES = 16
_STEP_BYTES = 1024  # of each row
_MANY_ROWS = 8192
_FEW_ROWS = 512
_MOST_TOKENS = 16
_TOKENS = 4  # of a program
_FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# Constants of the kernel:
#
# TILE_ROWS, TILE_COLUMNS   numbers that share a scale, f32 [out / TILE_ROWS, in / TILE_COLUMNS],
#                           multiples of ROWS and of VECTOR; TILE_COLUMNS 0: all of any rows do;
#                           TILE_ROWS 0: there are no scales
# ROWS, COLUMNS             of a program's step
# VECTOR                    numbers that a thread loads at once
# WORDS                     four numbers are loaded as a word, and brought to f32 by assembler
# EVEN                      columns are a multiple of COLUMNS
# ADD                       products are rounded and added to what lies in `out`
# TOKENS                    of a program; axis 0, so that programs that read the same rows are
#                           neighbours
@triton.jit
def few_tokens_numbers(
    out, x, weights, scales, bias, rows, columns, scale_columns, tokens, x_row, out_row,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr, WORDS: tl.constexpr,
    EVEN: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [tokens, columns] times weights [rows, columns]."""
    next_may_begin(DEPENDENT)
    first_token = tl.program_id(0) * TOKENS
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    IN_ONE: tl.constexpr = 4 if WORDS else 1
    STEP: tl.constexpr = COLUMNS // IN_ONE
    elements = columns // IN_ONE
    element = tl.arange(0, STEP)
    first_of_row = tl.minimum(row, rows - 1).to(tl.int64)[:, None] * elements
    if WORDS:
        weights = tl.multiple_of(weights.to(tl.pointer_type(tl.int32)), 16)
    at = weights + first_of_row + element[None, :]
    scale_at = scales
    if TILE_COLUMNS > 0:
        vector = tl.arange(0, COLUMNS // VECTOR) * VECTOR
        scale_at = scales + first // TILE_ROWS * scale_columns
    now = _load(at, element, 0, elements, EVEN)
    inputs_are_there(DEPENDENT)
    totals = (tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32),) * TOKENS
    for start in range(0, columns, COLUMNS):
        following = _load(at, element, start // IN_ONE + STEP, elements, False)
        here = start + column
        new = ()
        for number in tl.static_range(TOKENS):
            token = tl.minimum(first_token + number, tokens - 1)
            values = tl.load(x + token * x_row + here, mask=here < columns, other=0.0)
            values = values.to(tl.float32)
            if WORDS:
                products = _fours(now, values, COLUMNS)
            else:
                products = now.to(tl.float32) * values[None, :]
            sums = tl.sum(tl.reshape(products, (ROWS, COLUMNS // VECTOR, VECTOR // IN_ONE)), 2)
            if TILE_COLUMNS > 0:
                tile = (start + vector) // TILE_COLUMNS
                sums *= tl.load(scale_at + tile, mask=start + vector < columns, other=0.0)[None, :]
            new = new + (totals[number] + sums,)  # type: ignore[assignment]
        totals = new
        now = following
    for number in tl.static_range(TOKENS):
        token = first_token + number
        _store_token(
            out + token * out_row,
            tl.sum(totals[number], 1),
            scales,
            bias,
            row,
            row < tl.where(token < tokens, rows, 0),
            TILE_ROWS,
            TILE_COLUMNS,
            ADD,
        )


@triton.jit
def _store_token(
    out, result, scales, bias, row, inside,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sums of a token, scaled where all of a row share a scale, with what is added."""
    if TILE_ROWS > 0 and TILE_COLUMNS == 0:
        result *= tl.load(scales + row // TILE_ROWS, mask=inside, other=0.0)
    kind: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        result = rounded(result, kind)
        result += tl.load(out + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, rounded(result, kind).to(kind), mask=inside)


@triton.jit
def _load(at, element, start, elements, EVEN: tl.constexpr):
    """Weights of a step; zeros behind the last."""
    if EVEN:
        found = tl.load(at + start)
    else:
        found = tl.load(at + start, mask=(start + element < elements)[None, :], other=0.0)
    return found


@triton.jit
def _fours(words, x, COLUMNS: tl.constexpr):
    """Dot products of four e4m3 each in words [rows, COLUMNS / 4] with x [COLUMNS]."""
    low, high = tl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    even, odd = tl.split(tl.reshape(x, (COLUMNS // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    sums = _half(low) * x0[None, :] + _half(low >> 16) * x1[None, :]
    return sums + _half(high) * x2[None, :] + _half(high >> 16) * x3[None, :]


@triton.jit
def _half(words):
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Block sizes of a launch."""

    rows: int
    columns: int
    warps: int


def takes_numbers(x: Tensor, w: WeightTensor) -> bool:
    """Whether `multiply_numbers` takes x [tokens, in] and w."""
    most = _MOST_TOKENS if are_single() else 1
    if not 0 < len(x) <= most or x.dtype not in _FLOATS or x.stride(1) != 1:
        return False
    if w.activations is not Activations.FLOAT or w.data.data_ptr() % _VECTOR_BYTES:
        return False
    vector = _VECTOR_BYTES // w.data.element_size()
    if w.shape[1] % vector or not w.data.is_contiguous():
        return False
    if w.encoding is Encoding.FP8_BLOCK:
        height, width = w.tile
        whole = width >= w.shape[1] or (height % 32 == 0 and width % vector == 0)
        return whole and w.scales is not None
    return w.encoding.is_float


def sizes_of(w: WeightTensor) -> Sizes:
    """Block sizes.

    On an H200 28672 rows of 4096 inputs take 57 us in bf16 and in f16 and 33 in FP8 (of 56 and 28
    that reading takes), 4096 rows 9, 9 and 6.3, and of 14336 inputs 28, 28 and 18.  With steps of
    512 bytes of each row the last take 39, 37 and 31.
    """
    size = w.data.element_size()
    if w.shape[0] >= _MANY_ROWS:
        return Sizes(16, _STEP_BYTES // size, 4)
    if w.shape[0] <= _FEW_ROWS and w.encoding.is_float:
        # A program for each row: a router of 128 rows took 6.6 us with 8 programs.
        return Sizes(1, 4 * _STEP_BYTES // size, 4)
    return Sizes(16, _STEP_BYTES if size == 1 else 2 * _STEP_BYTES // size, 8)


def multiply_numbers(
    out: Tensor,
    x: Tensor,
    w: WeightTensor,
    bias: Tensor | None,
    *,
    add: bool = False,
    sizes: Sizes | None = None,
) -> None:
    """x [tokens, in] times w, to out [tokens, rows]; with `add`, rounded and added to `out`."""
    rows, columns = w.shape
    sizes = sizes or sizes_of(w)
    height, width = w.tile if w.encoding is Encoding.FP8_BLOCK else (0, 0)
    scale_columns = triton.cdiv(columns, width) if width else 0
    width = 0 if scale_columns == 1 else width
    together = min(_TOKENS, triton.next_power_of_2(len(x)))
    few_tokens_numbers[(triton.cdiv(len(x), together), triton.cdiv(rows, sizes.rows))](
        out, x, w.data, w.scales, bias, rows, columns, scale_columns,
        len(x), x.stride(0), out.stride(0),
        TILE_ROWS=height, TILE_COLUMNS=width, ROWS=sizes.rows, COLUMNS=sizes.columns,
        VECTOR=_VECTOR_BYTES // w.data.element_size(), 
        WORDS=w.encoding is Encoding.FP8_BLOCK and not interpreted(),
        EVEN=columns % sizes.columns == 0, ADD=add, TOKENS=together,
        num_warps=sizes.warps, **dependent(x.device),
    )  # fmt: skip
