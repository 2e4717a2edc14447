"""Biases of experts' matrices, found through the table of `expert_table`."""

import triton
import triton.language as tl

from hmt.kernels.triton.moe.weight_table import MATRICES, PARTS

# Rows of a table, of parts that are by themselves.
UP = tl.constexpr(len(PARTS) * MATRICES.index("up_proj"))
DOWN = tl.constexpr(len(PARTS) * MATRICES.index("down_proj"))
_BIAS = tl.constexpr(PARTS.index("bias"))


@triton.jit
def biases(its, part_stride, first_part, at_bias, row, there, BIAS: tl.constexpr):
    """Of rows `row` of one matrix, or of several: f32 in the shape of `there`, 0 elsewhere.

    its   where a table has the experts' addresses; it, first_part and at_bias are numbers or in a
          shape that goes with row's
    """
    parts = its + (first_part + _BIAS) * part_stride
    # An address that is not there is never followed: `there` says so.
    address = tl.load(parts) + at_bias
    numbers = tl.load(address.to(tl.pointer_type(BIAS)) + row, mask=there, other=0.0)
    return numbers.to(tl.float32)
