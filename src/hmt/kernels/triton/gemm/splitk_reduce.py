"""Sums of products that several programs made of parts of the inputs, added in their order."""

import triton
import triton.language as tl

from hmt.kernels.triton.pdl import inputs_are_there, next_may_begin


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["tokens"])
def add_parts(
    out, parts, bias_0, bias_1, bias_2, rows_0, rows_1, rows, tokens, out_stride,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """parts f32 [SPLIT, tokens, rows]: program (COLUMNS rows, token)."""
    next_may_begin(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < rows
    at = parts + token * rows + row
    inputs_are_there(DEPENDENT)
    total = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(at + part * (tokens * rows).to(tl.int64), mask=inside, other=0.0)
    if bias_0 is not None:
        total += tl.load(bias_0 + row, mask=row < rows_0, other=0.0).to(tl.float32)
    if bias_1 is not None:
        its = (row >= rows_0) & (row < rows_0 + rows_1)
        total += tl.load(bias_1 + row - rows_0, mask=its, other=0.0).to(tl.float32)
    if bias_2 is not None:
        its = (row >= rows_0 + rows_1) & inside
        total += tl.load(bias_2 + row - rows_0 - rows_1, mask=its, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    here = out + token * out_stride + row
    if ADD:
        total = total.to(kind).to(tl.float32)
        total += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    tl.store(here, total.to(kind), mask=inside)
