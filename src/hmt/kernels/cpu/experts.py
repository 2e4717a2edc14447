"""Mixture of experts through the compiled extension: all given experts in one call.

Results are those of `hmt.kernels.reference.experts` on the extension's linear layers; the
activation function may differ in its last place.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.linear import projections
from hmt.kernels.reference.experts import Expert, matrix_name
from hmt.kernels.weight_cache import WeightCache

# The extension's own description of an expert, kept with its gate; None where it has none.
_EXPERTS: WeightCache[Any] = WeightCache()
_NAMES = ("gate_proj", "up_proj", "down_proj")


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
    if x.dtype not in DTYPES or activation not in ACTIVATIONS:
        return None
    table = [native_expert(native, index, params) for index, params in given]
    if None in table:
        return None
    x = x if x.stride(-1) == 1 else x.contiguous()
    chosen, scales = chosen.contiguous(), scales.float().contiguous()
    width = given[0][1]["down_proj"].shape[0] if given else x.shape[1]
    fresh = total is None
    if total is None:
        total = torch.empty(x.shape[0], width)
    result = torch.empty(x.shape[0], width, dtype=x.dtype) if last else total
    kind = DTYPES[x.dtype]
    native.experts(
        table,
        chosen.data_ptr(),
        scales.data_ptr(),
        chosen.shape[1],
        x.data_ptr(),
        kind,
        *x.shape,
        x.stride(0),
        ACTIVATIONS[activation],
        total.data_ptr(),
        fresh,
        result.data_ptr() if last else 0,
        kind,
        width,
        torch.get_num_threads(),
    )
    return result


def native_expert(native: ModuleType, index: int, params: Mapping[str, WeightTensor]) -> Any:
    """The extension's own description of an expert, made once; None where it cannot compute on it.

    It borrows the memory of `params`.
    """
    gate = params[matrix_name(params, "gate_proj")]
    try:
        return _EXPERTS[gate]
    except KeyError:
        expert = _EXPERTS[gate] = _describe(native, index, params)
        return expert


def _describe(native: ModuleType, index: int, params: Mapping[str, WeightTensor]) -> Any:
    names = tuple(matrix_name(params, name) for name in _NAMES)
    found, _ = projections(native, params, names)
    return native.Expert(index, found) if found else None
