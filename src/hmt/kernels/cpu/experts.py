"""Mixture of experts through the compiled extension: all given experts in one call.

Results are those of `hmt.kernels.reference.experts` on the extension's linear layers; the
activation function may differ in its last place.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.reference.experts import Expert

_NAMES = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_F32_SCALES = 1
_CODES = {
    Encoding.F32: 0,
    Encoding.BF16: 1,
    Encoding.F16: 2,
    Encoding.FP8_BLOCK: 3,
    Encoding.INT8_CHANNEL: 4,
}


def experts(
    native: ModuleType,
    x: Tensor,
    given: Sequence[Expert],
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None,
    *,
    last: bool,
) -> Tensor | None:
    """`reference.experts` in one call; None where the extension has no kernel for a weight."""
    if x.dtype not in _DTYPES or activation not in _ACTIVATIONS:
        return None
    table = []
    for index, params in given:
        expert = native_expert(native, index, params)
        if expert is None:
            return None
        table.append(expert)
    x = x if x.stride(-1) == 1 else x.contiguous()
    chosen, scales = chosen.contiguous(), scales.float().contiguous()
    width = given[0][1]["down_proj"].shape[0] if given else x.shape[1]
    fresh = total is None
    if total is None:
        total = torch.empty(x.shape[0], width)
    result = torch.empty(x.shape[0], width, dtype=x.dtype) if last else total
    kind = _DTYPES[x.dtype]
    native.experts(
        table,
        chosen.data_ptr(),
        scales.data_ptr(),
        chosen.shape[1],
        x.data_ptr(),
        kind,
        *x.shape,
        x.stride(0),
        _ACTIVATIONS[activation],
        total.data_ptr(),
        fresh,
        result.data_ptr() if last else 0,
        kind,
        width,
        torch.get_num_threads(),
    )
    return result


def native_expert(native: ModuleType, index: int, params: Mapping[str, WeightTensor]) -> Any:
    """An expert as the extension takes it; it borrows the memory of `params`.  None if it cannot.

    Biases must be f32, bf16 or f16.
    """
    weights = [_native_weight(native, params[name]) for name in _NAMES]
    if None in weights:
        return None
    biases = None
    if any(f"{name}_bias" in params for name in _NAMES):
        found = [params.get(f"{name}_bias") for name in _NAMES]
        biases = tuple(
            (0, 0) if bias is None else (bias.data.data_ptr(), _DTYPES[bias.data.dtype])
            for bias in found
        )
    return native.Expert(index, *weights, biases)


def _native_weight(native: ModuleType, w: WeightTensor) -> Any:
    code = _CODES.get(w.encoding)
    if code is None or not w.data.is_contiguous():
        return None
    rows, columns = w.shape
    scale_type, scales, tile = 0, 0, (1, columns)
    if w.scales is not None:
        scale_type, scales = _F32_SCALES, w.scales.data_ptr()
    if w.encoding is Encoding.FP8_BLOCK:
        tile = w.tile
    int8 = w.activations is Activations.INT8_TOKEN
    data = w.data.data_ptr()
    return native.make_weight(
        code, 0, rows, columns, data, scale_type, scales, *tile, 0, 0, 1.0, int8
    )
