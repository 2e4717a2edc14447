"""Norm, rotary embedding and gated activation through the compiled extension.

Rounding is that of `hmt.kernels.reference`.  Sums of squares are added in another order, and
exponentials differ in their last bits; rotations equal the reference to the bit.

A decode step calls these a few times per layer with one token, and each is over within a
microsecond, so nothing here makes a tensor besides the result.
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES, SIGMOID

# As in csrc/linear/kernels.h: rows of codes are padded to a multiple of so many.
_CODE_PAD = 64


def rms_norm(
    native: ModuleType, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> Tensor:
    """`reference.rms_norm` by the extension."""
    if _is_plain(x, weight):
        out = torch.empty_like(x)
        _norm_plain(native, x, weight, eps, offset, out, 0)
        return out
    if not _can_norm(x, weight):
        return reference.rms_norm(x, weight, eps, offset=offset)
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm(native, x, weight, eps, offset, out)
    return out


def rms_norm_inplace(
    native: ModuleType, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> None:
    """`reference.rms_norm_inplace` by the extension."""
    if not _can_norm(x, weight):
        return reference.rms_norm_inplace(x, weight, eps, offset=offset)
    _norm(native, x, weight, eps, offset, x)


def add_rms_norm(
    native: ModuleType,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> Tensor:
    """`reference.add_rms_norm` by the extension."""
    if not _can_add(residual, x) or not _is_plain(x, weight):
        return reference.add_rms_norm(residual, x, weight, eps, offset=offset)
    out = torch.empty_like(x)
    _norm_plain(native, x, weight, eps, offset, out, residual.data_ptr())
    return out


def rms_norm_quantize(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.rms_norm_quantize`, or `add_rms_norm_quantize` with a residual."""
    if (
        x.dim() != 2
        or not _is_plain(x, weight)
        or (residual is not None and not _can_add(residual, x))
    ):
        if residual is None:
            return reference.rms_norm_quantize(x, weight, eps, offset=offset)
        return reference.add_rms_norm_quantize(residual, x, weight, eps, offset=offset)
    tokens, width = x.shape
    stride = -(-width // _CODE_PAD) * _CODE_PAD
    out = torch.empty_like(x)
    codes = torch.empty((tokens, stride), dtype=torch.int8)
    scales = torch.empty(tokens)
    sums = torch.empty((tokens, stride // 16), dtype=torch.int32)
    native.rms_norm_quantize(
        x.data_ptr(),
        DTYPES[x.dtype],
        tokens,
        width,
        width,
        out.data_ptr(),
        weight.data_ptr(),
        DTYPES[weight.dtype],
        eps,
        offset,
        0 if residual is None else residual.data_ptr(),
        codes.data_ptr(),
        stride,
        scales.data_ptr(),
        sums.data_ptr(),
        torch.get_num_threads(),
    )
    return out, codes, scales, sums


def add_rms_norm_quantize(
    native: ModuleType,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.add_rms_norm_quantize` by the extension: changes `residual`."""
    return rms_norm_quantize(native, x, weight, eps, offset=offset, residual=residual)


def rope(
    native: ModuleType, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """`reference.rope` by the extension."""
    if not _can_rotate(x, cos, sin):
        return reference.rope(x, cos, sin, interleaved=interleaved)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape
    token_stride, head_stride, _ = x.stride()
    native.rotate(
        x.data_ptr(),
        DTYPES[x.dtype],
        tokens,
        heads,
        dim,
        token_stride,
        head_stride,
        out.data_ptr(),
        heads * dim,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        torch.get_num_threads(),
    )
    return out


def head_products(native: ModuleType, x: Tensor, matrices: Tensor) -> Tensor | None:
    """`reference.head_products` by the extension; None where it has no kernel."""
    if x.dtype not in DTYPES or matrices.dtype is not x.dtype or x.stride(2) != 1:
        return None
    head_stride, in_stride, out_stride = matrices.stride()
    if 1 not in (in_stride, out_stride):
        return None
    tokens, heads, _ = x.shape
    _, inputs, outputs = matrices.shape
    transposed = out_stride != 1
    out = torch.empty(tokens, heads, outputs, dtype=x.dtype)
    native.multiply_heads(
        x.data_ptr(),
        DTYPES[x.dtype],
        tokens,
        heads,
        inputs,
        x.stride(0),
        x.stride(1),
        matrices.data_ptr(),
        outputs,
        head_stride,
        out_stride if transposed else in_stride,
        transposed,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rope_inplace(
    native: ModuleType,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """`reference.rope_inplace` by the extension."""
    alike = q.dtype is k.dtype and q.shape[2:] == k.shape[2:]
    if not (alike and _can_rotate(q, cos, sin) and _can_rotate(k, cos, sin)):
        return reference.rope_inplace(q, k, cos, sin, interleaved=interleaved)
    tokens, q_heads, dim = q.shape
    q_token_stride, q_head_stride, _ = q.stride()
    k_token_stride, k_head_stride, _ = k.stride()
    native.rotate_in_place(
        q.data_ptr(),
        q_heads,
        q_token_stride,
        q_head_stride,
        k.data_ptr(),
        k.shape[1],
        k_token_stride,
        k_head_stride,
        DTYPES[q.dtype],
        tokens,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        interleaved,
        torch.get_num_threads(),
    )


def gated(native: ModuleType, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`reference.gated` by the extension."""
    shape = gate.shape
    if (
        activation not in ACTIVATIONS
        or len(shape) != 2
        or shape != up.shape
        or gate.dtype not in DTYPES
        or gate.dtype is not up.dtype
        or gate.stride(1) != 1
        or up.stride(1) != 1
    ):
        return reference.gated(gate, up, activation)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    function = ACTIVATIONS[activation]
    _gate(native, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out, function)
    return out


def sigmoid_gated(native: ModuleType, x: Tensor, gate: Tensor) -> Tensor:
    """`reference.sigmoid_gated` by the extension."""
    dtype = x.dtype
    if (
        dtype not in DTYPES
        or gate.dtype is not dtype
        or x.dim() != 2
        or gate.shape not in (x.shape, (len(x), 1))
        or x.stride(1) != 1
        or gate.stride(1) != 1
    ):
        return reference.sigmoid_gated(x, gate)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    one_gate = gate.shape[1] != x.shape[1]
    rows = gate.data_ptr(), gate.stride(0), x.data_ptr(), x.stride(0)
    _gate(native, *rows, out, SIGMOID, one_gate=one_gate)
    return out


def gated_pair(native: ModuleType, gate_up: Tensor, activation: str) -> Tensor:
    """`reference.gated_pair` by the extension."""
    if (
        activation not in ACTIVATIONS
        or gate_up.dim() != 2
        or gate_up.dtype not in DTYPES
        or gate_up.stride(1) != 1
    ):
        return reference.gated_pair(gate_up, activation)
    tokens, both = gate_up.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up.dtype)
    stride, address = gate_up.stride(0), gate_up.data_ptr()
    up = address + both // 2 * gate_up.element_size()
    _gate(native, address, stride, up, stride, out, ACTIVATIONS[activation])
    return out


def _gate(
    native: ModuleType,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    out: Tensor,
    activation: int,
    *,
    one_gate: bool = False,
) -> None:
    tokens, width = out.shape
    native.gated(
        gate,
        gate_stride,
        up,
        up_stride,
        DTYPES[out.dtype],
        activation,
        tokens,
        width,
        out.data_ptr(),
        width,
        one_gate,
        torch.get_num_threads(),
    )


def _norm_plain(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out: Tensor,
    residual: int,
) -> None:
    width = x.shape[-1]
    native.rms_norm(
        x.data_ptr(),
        DTYPES[x.dtype],
        x.numel() // width,
        1,
        width,
        width,
        0,
        out.data_ptr(),
        width,
        0,
        weight.data_ptr(),
        DTYPES[weight.dtype],
        eps,
        offset,
        residual,
        torch.get_num_threads(),
    )


def _norm(
    native: ModuleType, x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor
) -> None:
    shape, strides, out_strides = x.shape, x.stride(), out.stride()
    heads, head_stride, out_head_stride = 1, 0, 0
    if len(shape) == 3:
        heads, head_stride, out_head_stride = shape[1], strides[1], out_strides[1]
    native.rms_norm(
        x.data_ptr(),
        DTYPES[x.dtype],
        shape[0],
        heads,
        shape[-1],
        strides[0],
        head_stride,
        out.data_ptr(),
        out_strides[0],
        out_head_stride,
        weight.data_ptr(),
        DTYPES[weight.dtype],
        eps,
        offset,
        0,
        torch.get_num_threads(),
    )


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Rows one after the other, in types that the extension has."""
    shape = x.shape
    return (
        x.is_contiguous()
        and len(shape) > 0
        and 0 < shape[-1] == weight.numel()
        and weight.is_contiguous()
        and x.dtype in DTYPES
        and weight.dtype in DTYPES
    )


def _can_norm(x: Tensor, weight: Tensor) -> bool:
    width = x.shape[-1]
    return (
        x.dtype in DTYPES
        and weight.dtype in DTYPES
        and 2 <= x.dim() <= 3
        and weight.shape == (width,)
        and width > 0
        and x.stride(-1) == 1
        and weight.is_contiguous()
    )


def _can_add(residual: Tensor, x: Tensor) -> bool:
    return residual.dtype is x.dtype and residual.shape == x.shape and residual.is_contiguous()


def _can_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.dtype in DTYPES
        and x.dim() == 3
        and x.stride(2) == 1
        and cos.dtype is sin.dtype is torch.float32
        and cos.shape == sin.shape
        and cos.shape[0] == x.shape[0]
        and cos.shape[1] <= x.shape[2]
        and cos.is_contiguous()
        and sin.is_contiguous()
    )
