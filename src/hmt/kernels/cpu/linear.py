"""Linear layers through the compiled extension.

The integer products and the dequantised numbers equal those of `hmt.kernels.reference` to the bit.
The product with bf16 weights sums in f32 in another order.
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference

# A product of so many int8 numbers cannot leave int32.
_MOST_INT8_COLUMNS = (1 << 31) // (127 * 128)
_INT4_GROUPS = (32, 64, 128)
_BF16_TOKENS = 4


def linear(native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None) -> Tensor:
    """`reference.linear`, on the extension where that is faster."""
    if not _is_dense(w):
        return reference.linear(x, w, bias)
    if w.activations is Activations.INT8_TOKEN:
        return _linear_int8_tokens(native, x, w, bias)
    if not w.encoding.is_float:
        return reference.linear_by_chunks(
            x, w, bias, lambda w, dtype, rows: dequantize(native, w, dtype, rows)
        )
    small = 0 < x.shape[0] <= _BF16_TOKENS and x.dtype in (torch.bfloat16, torch.float32)
    if w.encoding is Encoding.BF16 and small:
        return _linear_bf16(native, x, w, bias)
    return reference.linear(x, w, bias)


def dequantize(
    native: ModuleType, w: WeightTensor, dtype: torch.dtype, rows: slice | None
) -> Tensor:
    """`reference.dequantize`, the numbers computed by the extension."""
    if w.encoding.is_float or not _is_dense(w):
        return reference.dequantize(w, dtype, rows)
    assert w.scales is not None
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    columns = w.shape[1]
    out = torch.empty(stop - start, columns)
    codes = w.data[start:stop].data_ptr()
    size = (stop - start, columns)
    if w.encoding is Encoding.FP8_BLOCK:
        native.dequantize_fp8(codes, w.scales.data_ptr(), start, *size, *w.tile, out.data_ptr())
        return out.to(dtype)
    scales = w.scales[start:stop].data_ptr()
    if w.encoding is Encoding.INT8_CHANNEL:
        native.dequantize_int8(codes, scales, *size, out.data_ptr())
    else:
        native.dequantize_int4(codes, scales, *size, w.group_size, out.data_ptr())
    return out.to(dtype)


def quantize_activations(native: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.quantize_activations` in one pass."""
    values = x.float().contiguous()
    codes = torch.empty(values.shape, dtype=torch.int8)
    scales = torch.empty(values.shape[0])
    native.quantize_tokens(values.data_ptr(), *values.shape, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def _linear_int8_tokens(
    native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None
) -> Tensor:
    assert w.scales is not None
    rows, columns = w.shape
    values = x.float().contiguous()
    out = torch.empty(x.shape[0], rows)
    given = (values.data_ptr(), x.shape[0], w.data.data_ptr(), w.scales.data_ptr(), rows, columns)
    if w.encoding is Encoding.INT8_CHANNEL and columns <= _MOST_INT8_COLUMNS:
        native.linear_int8(*given, out.data_ptr())
    elif w.encoding is Encoding.INT4_GROUP and w.group_size in _INT4_GROUPS:
        native.linear_int4(*given, w.group_size, out.data_ptr())
    else:
        return reference.linear(x, w, bias)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _linear_bf16(native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None) -> Tensor:
    values = x.float().contiguous()
    out = torch.empty(x.shape[0], w.shape[0])
    native.linear_bf16(values.data_ptr(), x.shape[0], w.data.data_ptr(), *w.shape, out.data_ptr())
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _is_dense(w: WeightTensor) -> bool:
    return w.data.is_contiguous() and (w.scales is None or w.scales.is_contiguous())
