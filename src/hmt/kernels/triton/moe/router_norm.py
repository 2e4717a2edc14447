"""What a router sees: the norm of hidden states, and its products with the router's rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.reference.sublayers import NormOptions
from hmt.kernels.triton.device_math import rounded
from hmt.kernels.triton.elementwise.norms import add_rms_norm, rms_norm
from hmt.kernels.triton.gemm.dispatch import linear
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.single_tokens import are_single

_MOST_TOKENS = 8  # each of them reads the router again, from the cache
_LARGEST_WIDTH = 16384  # a row is held in registers
_ROWS = 2  # experts of a program: 57 KB of f32 on 128 multiprocessors, at a width of 7168


@triton.jit
def _logits_kernel(
    hidden, weight, out, router, logits, rows, hidden_row, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: ROWS experts; axis 1: tokens.  The first program of a token writes its norm."""
    next_may_begin(DEPENDENT)
    kind: tl.constexpr = hidden.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & inside[None, :]
    by = tl.load(weight + column, mask=inside, other=0.0)
    numbers = tl.load(router + row.to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)
    inputs_are_there(DEPENDENT)
    values = tl.load(hidden + token * hidden_row + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / WIDTH
    normed = rounded(values * tl.rsqrt(mean + eps), kind) * rounded(by.to(tl.float32), kind)
    normed = rounded(normed, kind)
    if tl.program_id(0) == 0:
        tl.store(out + token * WIDTH + column, normed.to(kind), mask=inside)
    total = tl.sum(numbers.to(tl.float32) * normed[None, :], 1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(logits + token * rows + at, total, mask=at < rows)


def router_inputs(
    hidden: Tensor, x: Tensor | None, norm: Tensor, options: NormOptions, router: WeightTensor
) -> tuple[Tensor, Tensor]:
    """See `reference.router_inputs`: hidden += x; its norm, and f32 logits [tokens, experts].

    Of few tokens, and without x, in one launch: no program may write what all read.
    """
    tokens, width = hidden.shape
    plain = router.encoding.is_float and router.data.is_contiguous() and hidden.stride(1) == 1
    few = tokens > 0 and (tokens <= _MOST_TOKENS or are_single())
    small = few and width <= _LARGEST_WIDTH
    if x is not None or options.offset or not (plain and small):
        eps, offset = options.eps, options.offset
        if x is None:
            out = rms_norm(hidden, norm, eps, offset=offset)
        else:
            out = add_rms_norm(hidden, x, norm, eps, offset=offset)
        return out, linear(out.float(), router)
    experts = router.shape[0]
    out = torch.empty(tokens, width, dtype=hidden.dtype, device=hidden.device)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=hidden.device)
    _logits_kernel[(triton.cdiv(experts, _ROWS), tokens)](
        hidden, norm, out, router.data, logits, experts, hidden.stride(0), options.eps,
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), ROWS=_ROWS,
        num_warps=8, **dependent(hidden.device),
    )  # fmt: skip
    return out, logits
