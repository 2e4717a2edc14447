"""Two parts of attention as one, where one of them lies in pinned host memory.

By the kernel that needs it a part of one token (32 heads of 128 numbers, 16 KB) comes over the link
without a copy of its own.
"""

import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit
def _join(
    out, lse, other_out, other_lse, joined, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
):
    """Program (row): see `join`."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED)
    inside = dim < VALUE_DIM
    log, other_log = tl.load(lse + row), tl.load(other_lse + row)
    top = tl.maximum(log, other_log)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weight, other_weight = tl.exp(log - finite), tl.exp(other_log - finite)
    total = weight + other_weight
    here = tl.load(out + row * VALUE_DIM + dim, inside, 0.0)
    there = tl.load(other_out + row * VALUE_DIM + dim, inside, 0.0)
    mixed = tl.where(weight > 0, here * weight, 0.0)
    mixed += tl.where(other_weight > 0, there * other_weight, 0.0)
    divisor = tl.where(total == 0, 1.0, total)
    mixed /= divisor
    tl.store(joined + row * VALUE_DIM + dim, mixed.to(joined.dtype.element_ty), inside)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), finite + tl.log(divisor)))
# fmt: on


def join(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, joined: Tensor) -> None:
    """Write attention over the positions of two parts to `joined`, and let `lse` be of both.

    out, other_out   f32 [tokens, q_heads, value_dim], with lse and other_lse f32 [tokens, q_heads];
            a row whose lse is -inf may hold anything
    joined  of any float dtype

    All are contiguous.  On the current stream; the CPU waits for nothing.
    """
    rows, value_dim = lse.numel(), out.shape[-1]
    assert all(x.is_contiguous() for x in (out, lse, other_out, other_lse, joined))
    if rows:
        padded = triton.next_power_of_2(value_dim)
        _join[(rows,)](
            out, lse, other_out, other_lse, joined, VALUE_DIM=value_dim, PADDED=padded, num_warps=1
        )
