"""What low-rank adapters add to products, for all rows and adapters in two launches.

A program has one row, and takes its sums in one order, so that a row's result depends on nothing
but the row and its adapter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.adapter import AdaptedWeight
from hmt.kernels.weight_cache import WeightCache

_RANKS = 16  # for a program
_INPUTS = 256  # at a time
_OUTPUTS = 256  # for a program


class _Rows(NamedTuple):
    """Rows whose adapters have numbers of one dtype, each with its adapter; all on the device.

    downs, ups   addresses, int64 [rows]
    held         what these point to
    """

    rows: Tensor
    downs: Tensor
    ups: Tensor
    ranks: Tensor
    scales: Tensor
    most: int
    held: list[Tensor]


_ROWS: WeightCache[list[_Rows]] = WeightCache()


@triton.jit
def _down_kernel(
    low,
    x,
    rows,
    downs,
    ranks,
    x_stride,
    inputs,
    most,
    like,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
):
    """low[row, ranks] = down . x[row].  Axis 0: rows; axis 1: ranks."""
    at = tl.program_id(0)
    rank = tl.load(ranks + at)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    row = tl.load(rows + at)
    down = tl.load(downs + at).to(tl.pointer_type(like.dtype.element_ty))
    sums = tl.zeros((RANKS, STEP), tl.float32)
    for first in range(0, inputs, STEP):
        i = first + tl.arange(0, STEP)
        some = tl.load(x + row * x_stride + i, mask=i < inputs, other=0.0).to(tl.float32)
        inside = (r[:, None] < rank) & (i[None, :] < inputs)
        matrix = tl.load(down + r[:, None] * inputs + i[None, :], mask=inside, other=0.0)
        sums += matrix.to(tl.float32) * some[None, :]
    tl.store(low + at * most + r, tl.sum(sums, 1), mask=r < rank)


@triton.jit
def _up_kernel(
    out, low, rows, ups, ranks, scales, out_stride, outputs, most, like, STEP: tl.constexpr
):
    """out[row] += scale * low . up.  Axis 0: rows; axis 1: parts of a row."""
    at = tl.program_id(0)
    o = tl.program_id(1) * STEP + tl.arange(0, STEP)
    row = tl.load(rows + at)
    up = tl.load(ups + at).to(tl.pointer_type(like.dtype.element_ty))
    total = tl.zeros((STEP,), tl.float32)
    for r in range(0, tl.load(ranks + at)):
        matrix = tl.load(up + r * outputs + o, mask=o < outputs, other=0.0)
        total += tl.load(low + at * most + r) * matrix.to(tl.float32)
    to = out + row * out_stride + o
    value = tl.load(to, mask=o < outputs).to(tl.float32) + total * tl.load(scales + at)
    tl.store(to, value.to(out.dtype.element_ty), mask=o < outputs)


def add_low_rank(out: Tensor, x: Tensor, w: AdaptedWeight) -> None:
    """`reference.add_low_rank`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = _ROWS.get(w)
    if parts is None:
        parts = _ROWS[w] = _described(w, x.device)
    for part in parts:
        count, (inputs, outputs) = len(part.rows), (x.shape[1], out.shape[1])
        low = torch.empty(count, part.most, device=x.device)
        _down_kernel[count, triton.cdiv(part.most, _RANKS)](
            low, x, part.rows, part.downs, part.ranks, x.stride(0), inputs, part.most,
            part.held[0], RANKS=_RANKS, STEP=_INPUTS,
        )  # fmt: skip
        _up_kernel[count, triton.cdiv(outputs, _OUTPUTS)](
            out, low, part.rows, part.ups, part.ranks, part.scales, out.stride(0), outputs,
            part.most, part.held[0], STEP=_OUTPUTS,
        )  # fmt: skip


def _described(w: AdaptedWeight, where: torch.device) -> list[_Rows]:
    by_dtype: dict[torch.dtype, list[tuple[int, int, int, int, float]]] = {}
    held: dict[torch.dtype, list[Tensor]] = {}
    for number in w.rows.present:
        part = w.low_rank.get(number)
        if part is None:
            continue
        down, up = part.on(where)
        dtype = up.dtype
        assert down.dtype is dtype, "both matrices of an adapter have one dtype"
        held.setdefault(dtype, []).extend((down, up))
        each = down.data_ptr(), up.data_ptr(), part.rank, part.scale
        own = w.rows.of(number, torch.device("cpu")).tolist()
        by_dtype.setdefault(dtype, []).extend((row, *each) for row in own)
    found = []
    for dtype, entries in by_dtype.items():
        rows, downs, ups, ranks, scales = zip(*entries, strict=True)
        factors = torch.tensor(scales, dtype=torch.float32, device=where)
        places, down, up, each_rank = (
            torch.tensor(numbers, device=where) for numbers in (rows, downs, ups, ranks)
        )
        found.append(_Rows(places, down, up, each_rank, factors, max(ranks), held[dtype]))
    return found
