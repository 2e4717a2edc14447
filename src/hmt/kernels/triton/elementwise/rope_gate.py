"""Rotary embedding and gated activations on the GPU, in one launch each; norms are in `norms`.

Rounding is that of `hmt.kernels.reference`; exponentials differ in their last bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.triton.device_math import activated, rounded
from hmt.kernels.triton.elementwise.norms import (
    add_rms_norm,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_inplace,
    rms_norm_quantize,
)
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin

__all__ = [
    "add_rms_norm",
    "add_rms_norm_quantize",
    "gated",
    "gated_pair",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@triton.jit
def _turn_heads(
    x, out, cos, sin, token, head, heads, x_token, x_head, out_token, out_head, angle_token,
    DIM: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Some heads [n, 1] of one token, from x to out, which may be the same."""
    kind: tl.constexpr = x.dtype.element_ty
    pair = tl.arange(0, LANES)[None, :]
    inside = (head < heads) & (pair < HALF)
    angle = token * angle_token + pair
    by_cos = rounded(tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32), kind)
    by_sin = rounded(tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32), kind)
    source = x + token * x_token + head * x_head
    target = out + token * out_token + head * out_head
    if INTERLEAVED:
        first = tl.load(source + 2 * pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # out may be x, and lanes that store are not those that loaded
    one = rounded(first * by_cos, kind) - rounded(second * by_sin, kind)
    two = rounded(second * by_cos, kind) + rounded(first * by_sin, kind)
    tl.store(target + pair, one.to(kind), mask=inside)
    tl.store(target + HALF + pair, two.to(kind), mask=inside)
    if COPY:
        other = 2 * HALF + tl.arange(0, REST)[None, :]
        kept = (head < heads) & (other < DIM)
        tl.store(target + other, tl.load(source + other, mask=kept), mask=kept)


@triton.jit
def _rope_kernel(
    q, q_out, q_heads, q_token, q_head, q_out_token, q_out_head,
    k, k_heads, k_token, k_head,
    cos, sin, angle_token, q_blocks,
    DIM: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, COPY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens; axis 1: HEADS heads of q, then HEADS heads of k, which is turned in place."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    if block < q_blocks:
        _turn_heads(
            q, q_out, cos, sin, token, block * HEADS + head, q_heads, q_token, q_head,
            q_out_token, q_out_head, angle_token,
            DIM, HALF, LANES, REST, INTERLEAVED, COPY,
        )  # fmt: skip
    else:
        _turn_heads(
            k, k, cos, sin, token, (block - q_blocks) * HEADS + head, k_heads, k_token, k_head,
            k_token, k_head, angle_token,
            DIM, HALF, LANES, REST, INTERLEAVED, False,
        )  # fmt: skip


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """See `reference.rope`: x [tokens, heads, dim] turned, in x.dtype."""
    if x.stride(-1) != 1 or cos.stride(-1) != 1 or cos.stride() != sin.stride():
        return reference.rope(x, cos, sin, interleaved=interleaved)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn(x, out, None, cos, sin, interleaved)
    return out


def rope_inplace(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None:
    """See `reference.rope_inplace`: changes q and k, both [tokens, heads, dim]."""
    rows = (q.stride(-1), k.stride(-1), cos.stride(-1)) == (1, 1, 1)
    alike = q.dtype == k.dtype and q.shape[::2] == k.shape[::2] and cos.stride() == sin.stride()
    if not (rows and alike):
        return reference.rope_inplace(q, k, cos, sin, interleaved=interleaved)
    _turn(q, q, k, cos, sin, interleaved)


def _turn(
    q: Tensor, out: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool
) -> None:
    tokens, heads, dim = q.shape
    half = cos.shape[-1] // 2
    copy = out is not q and dim > 2 * half
    if tokens * dim == 0:
        return
    lanes = triton.next_power_of_2(max(half, 1))
    # One token is over soonest when its heads are spread; many tokens fill the card anyway.
    together = max(1, min(triton.next_power_of_2(heads), (256 if tokens < 64 else 1024) // lanes))
    blocks = triton.cdiv(heads, together)
    other = q if k is None else k
    all_blocks = blocks + (0 if k is None else triton.cdiv(other.shape[1], together))
    if all_blocks == 0:
        return
    _rope_kernel[(tokens, all_blocks)](
        q, out, heads, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        other, other.shape[1], other.stride(0), other.stride(1),
        cos, sin, cos.stride(0), blocks,
        DIM=dim, HALF=half, LANES=lanes, REST=triton.next_power_of_2(max(dim - 2 * half, 1)),
        HEADS=together, INTERLEAVED=interleaved, COPY=copy,
        num_warps=1 if tokens < 64 else 4,
        **dependent(q.device),
        enable_fp_fusion=False,  # products are rounded before they are added
    )  # fmt: skip


@triton.jit
def _gated_kernel(
    gate, up, out, width, gate_row, up_row,
    ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows; axis 1: COLUMNS columns."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    kind: tl.constexpr = gate.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    product = rounded(activated(first, ACTIVATION), kind) * second
    tl.store(out + row * width + column, product.to(kind), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See `reference.gated`: activation(gate) * up, in their dtype."""
    alike = gate.dtype == up.dtype and gate.shape == up.shape and gate.dim() > 0
    if activation not in ACTIVATIONS or not alike:
        return reference.gated(gate, up, activation)
    shape, width = gate.shape, gate.shape[-1]
    if gate.numel() == 0:
        return torch.empty(shape, dtype=gate.dtype, device=gate.device)
    gate, up = _matrix(gate, width), _matrix(up, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = gate.shape[0]
    columns = min(256 if rows < 64 else 1024, triton.next_power_of_2(width))
    _gated_kernel[(rows, triton.cdiv(width, columns))](
        gate, up, out, width, gate.stride(0), up.stride(0),
        ACTIVATION=activation, COLUMNS=columns, num_warps=max(1, columns // 256),
        **dependent(gate.device),
    )  # fmt: skip
    return out.view(shape)


def gated_pair(gate_up: Tensor, activation: str) -> Tensor:
    """See `reference.gated_pair`: gate_up [tokens, 2 * width] to [tokens, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, activation)


@triton.jit
def _sigmoid_gated_kernel(
    x, gate, out, width, x_row, gate_row, gate_column,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows; axis 1: COLUMNS columns.  gate_column is 0 where a row has one gate."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    number = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    at = gate + row * gate_row + column * gate_column
    opened = 1 / (1 + tl.exp(-tl.load(at, mask=inside, other=0.0).to(tl.float32)))
    product = number * rounded(opened, kind)
    tl.store(out + row * width + column, product.to(kind), mask=inside)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.sigmoid_gated`: one launch where torch needs eight."""
    matrices = x.dim() == gate.dim() == 2 and x.stride(-1) == 1 and len(x) == len(gate)
    if not matrices or gate.shape[1] not in (1, x.shape[1]):
        return reference.sigmoid_gated(x, gate)
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    columns = min(256 if rows < 64 else 1024, triton.next_power_of_2(width))
    _sigmoid_gated_kernel[(rows, triton.cdiv(width, columns))](
        x, gate, out, width, x.stride(0), gate.stride(0),
        0 if gate.shape[1] == 1 else gate.stride(1),
        COLUMNS=columns, num_warps=max(1, columns // 256), **dependent(x.device),
    )  # fmt: skip
    return out


def _matrix(x: Tensor, width: int) -> Tensor:
    """x as [rows, width] with contiguous rows; a copy only where strides do not allow a view."""
    if x.dim() == 2 and x.stride(-1) == 1:
        return x
    return x.reshape(-1, width).contiguous()
