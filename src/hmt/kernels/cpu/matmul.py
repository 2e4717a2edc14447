"""Linear layers through the compiled extension.

The integer products and the dequantised numbers equal those of `hmt.kernels.reference` to the bit.
Products with float activations take weights that are not rounded to x.dtype, and sum in f32.

The extension computes on as many threads as torch would on the calling thread.
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference

# A product of so many int8 numbers cannot leave int32.
_MOST_INT8_COLUMNS = (1 << 31) // (127 * 128)
_INT4_GROUPS = (32, 64, 128)
_CODES = {
    Encoding.FP8_BLOCK: 0,
    Encoding.INT8_CHANNEL: 1,
    Encoding.INT4_GROUP: 2,
}


def linear(native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None) -> Tensor:
    """`reference.linear`, on the extension where that is faster."""
    if not _is_dense(w):
        return reference.linear(x, w, bias)
    if w.activations is Activations.INT8_TOKEN:
        return _linear_int8_tokens(native, x, w, bias)
    if x.shape[0] <= _most_tokens(x, w):
        return _linear_float(native, x, w, bias)
    if w.encoding.is_float:
        return reference.linear(x, w, bias)
    return reference.linear_by_chunks(
        x, w, bias, lambda w, dtype, rows: dequantize(native, w, dtype, rows)
    )


def dequantize(
    native: ModuleType, w: WeightTensor, dtype: torch.dtype, rows: slice | None
) -> Tensor:
    """`reference.dequantize`, the numbers computed by the extension."""
    if w.encoding.is_float or not _is_dense(w):
        return reference.dequantize(w, dtype, rows)
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    out = torch.empty(stop - start, w.shape[1])
    native.dequantize(*_encoded(w), start, stop - start, out.data_ptr(), torch.get_num_threads())
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
    result = (out.data_ptr(), torch.get_num_threads())
    if w.encoding is Encoding.INT8_CHANNEL and columns <= _MOST_INT8_COLUMNS:
        native.linear_int8(*given, *result)
    elif w.encoding is Encoding.INT4_GROUP and w.group_size in _INT4_GROUPS:
        native.linear_int4(*given, w.group_size, *result)
    else:
        return reference.linear(x, w, bias)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _linear_float(native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None) -> Tensor:
    values = x.float().contiguous()
    out = torch.empty(x.shape[0], w.shape[0])
    given = (values.data_ptr(), x.shape[0])
    result = (out.data_ptr(), torch.get_num_threads())
    if w.encoding is Encoding.BF16:
        native.linear_bf16(*given, w.data.data_ptr(), *w.shape, *result)
    else:
        native.linear_float(*given, *_encoded(w), w.shape[0], *result)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _most_tokens(x: Tensor, w: WeightTensor) -> int:
    """The number of tokens up to which the extension is faster than torch.

    Milliseconds on two Zen 5 cores, one bf16 token, [4096, 4096] out of memory: bf16 0.77 (torch
    1.27; on one core 1.06 and 2.08), fp8 1.96, int8 1.11, int4 1.64.  Two bf16 tokens are already
    faster in torch, and from about eight tokens dequantised chunks are, in any encoding.
    """
    if w.data.dtype == x.dtype == torch.bfloat16:
        return 1
    return 8 if w.encoding in _CODES or w.encoding is Encoding.BF16 else 0


def _encoded(w: WeightTensor) -> tuple[int, int, int, int, int, int]:
    """What the extension needs to know of a weight: `Encoded` in csrc/kernels.h."""
    columns = w.shape[1]
    match w.encoding:
        case Encoding.FP8_BLOCK:
            tile = w.tile
        case Encoding.INT4_GROUP:
            tile = (1, w.group_size)
        case _:
            tile = (1, columns)
    scales = 0 if w.scales is None else w.scales.data_ptr()
    return _CODES[w.encoding], w.data.data_ptr(), scales, columns, *tile


def _is_dense(w: WeightTensor) -> bool:
    return w.data.is_contiguous() and (w.scales is None or w.scales.is_contiguous())
