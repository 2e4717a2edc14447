"""Linear layers through the compiled extension.

Products with int8 activations and dequantised numbers equal those of `hmt.kernels.reference` to the
bit.  Products with float activations take weights that are not rounded to x.dtype, and sum in f32.

The extension computes on as many threads as torch would on the calling thread.
"""

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import (
    ACTIVATION_BLOCK,
    ACTIVATION_GROUP,
    BLOCK_SHAPES,
    Activations,
    Encoding,
    Packing,
    WeightTensor,
)
from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.reference import gguf_blocks
from hmt.kernels.weight_cache import WeightCache

# Numbers of the enums in csrc/linear/weight.h.
_CODES = {
    Encoding.F32: 0,
    Encoding.BF16: 1,
    Encoding.F16: 2,
    Encoding.FP8_BLOCK: 3,
    Encoding.INT8_CHANNEL: 4,
    Encoding.INT8_GROUP: 4,
    Encoding.INT4_GROUP: 5,
    Encoding.NVFP4: 6,
    Encoding.MXFP4: 6,
} | {encoding: 7 + index for index, encoding in enumerate(BLOCK_SHAPES)}
_PACKINGS = {Packing.ROWS: 0, Packing.PANELS: 1, Packing.BLOCKS: 2}
_SCALES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float8_e4m3fn: 4,
    torch.uint8: 5,
}
# Inputs that share a scale of int8 activations; of others, all of a token.
_SCALE_COLUMNS = {
    Activations.INT8_GROUP: ACTIVATION_GROUP,
    Activations.INT8_BLOCK: ACTIVATION_BLOCK,
}
# Of which type the grid is that codes of a type are looked up in.
_WITH_GRIDS = {
    Encoding.IQ2_XXS: Encoding.IQ2_XXS,
    Encoding.IQ2_XS: Encoding.IQ2_XS,
    Encoding.IQ2_S: Encoding.IQ2_S,
    Encoding.IQ3_XXS: Encoding.IQ3_XXS,
    Encoding.IQ3_S: Encoding.IQ3_S,
    Encoding.IQ1_S: Encoding.IQ1_S,
    Encoding.IQ1_M: Encoding.IQ1_S,
}
# A product of so many int8 numbers cannot leave int32.
_MOST_INT8_COLUMNS = (1 << 31) // (127 * 128)
_INT4_GROUPS = (16, 32, 64, 128)

# The extension's own description of a weight; None where it cannot compute on it.
_NATIVE: WeightCache[Any] = WeightCache()
# By the names of weights that are multiplied with at once, kept with the first of them: what
# `projections` returns.
_PROJECTIONS: WeightCache[dict[tuple[str, ...], tuple[tuple[Any, ...], int]]] = WeightCache()


def linear(native: ModuleType, x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """`reference.linear` by the extension."""
    weight = native_weight(native, w)
    if weight is None or x.dtype not in DTYPES:
        return reference.linear(x, w, bias)
    return _multiply(native, (weight if bias is None else _with_bias(weight, bias),), x, w.shape[0])


def linear_into(native: ModuleType, out: Tensor, x: Tensor, w: WeightTensor) -> bool:
    """`linear` without a bias, written to `out`; False, and nothing done, where it cannot be."""
    weight = native_weight(native, w)
    if weight is None or x.dtype not in DTYPES or out.dtype is not x.dtype or out.stride(1) != 1:
        return False
    _multiply_into(native, (weight,), x, out)
    return True


def linear_many(
    native: ModuleType, x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]
) -> Tensor:
    """`reference.linear_many` in one call, which prepares x once for all weights."""
    known = _PROJECTIONS.get(params[names[0]])
    if known is None:
        known = _PROJECTIONS[params[names[0]]] = {}
    if names not in known:
        known[names] = projections(native, params, names)
    weights, rows = known[names]
    if not weights or x.dtype not in DTYPES:
        biases = [params.get(f"{name}_bias") for name in names]
        parts = (
            linear(native, x, params[name], None if bias is None else bias.data)
            for name, bias in zip(names, biases, strict=True)
        )
        return torch.cat(tuple(parts), dim=1)
    return _multiply(native, weights, x, rows)


def projections(
    native: ModuleType, params: Mapping[str, WeightTensor], names: tuple[str, ...]
) -> tuple[tuple[Any, ...], int]:
    """What the extension multiplies with, empty where it cannot; and the rows of all together."""
    found = []
    for name in names:
        weight, bias = native_weight(native, params[name]), params.get(f"{name}_bias")
        if weight is None:
            return (), 0
        found.append(weight if bias is None else _with_bias(weight, bias.data))
    return tuple(found), sum(params[name].shape[0] for name in names)


def dequantize(
    native: ModuleType, w: WeightTensor, dtype: torch.dtype, rows: slice | None = None
) -> Tensor:
    """`reference.dequantize`, the numbers computed by the extension."""
    weight = None if w.encoding.is_float else native_weight(native, w)
    if weight is None or dtype not in DTYPES:
        return reference.dequantize(w, dtype, rows)
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    out = torch.empty(stop - start, w.shape[1], dtype=dtype)
    native.dequantize(
        weight, start, stop - start, out.data_ptr(), DTYPES[dtype], torch.get_num_threads()
    )
    return out


def quantize_activations(native: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.quantize_activations` in one pass."""
    if x.dtype not in DTYPES:
        return reference.quantize_activations(x)
    x = x.contiguous()
    tokens, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(tokens)
    native.quantize_tokens(
        x.data_ptr(),
        DTYPES[x.dtype],
        tokens,
        columns,
        columns,
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return codes, scales


def native_weight(native: ModuleType, w: WeightTensor) -> Any:
    """The extension's own description of `w`, made once; None where it cannot compute on it."""
    try:
        return _NATIVE[w]
    except KeyError:
        weight = _NATIVE[w] = _describe(native, w) if _is_supported(w) else None
        return weight


def is_compiled(native: ModuleType, w: WeightTensor) -> bool:
    """Whether the extension multiplies with `w`."""
    return native_weight(native, w) is not None


def _multiply(native: ModuleType, weights: tuple[Any, ...], x: Tensor, rows: int) -> Tensor:
    """x times all weights, side by side: [tokens, rows] in x.dtype."""
    out = torch.empty((x.shape[0], rows), dtype=x.dtype)
    _multiply_into(native, weights, x, out)
    return out


def _multiply_into(native: ModuleType, weights: tuple[Any, ...], x: Tensor, out: Tensor) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, columns = x.shape
    native.linear(
        weights,
        x.data_ptr(),
        DTYPES[x.dtype],
        tokens,
        columns,
        x.stride(0),
        out.data_ptr(),
        DTYPES[out.dtype],
        out.stride(0),
        torch.get_num_threads(),
    )


def _with_bias(weight: Any, bias: Tensor) -> tuple[Any, int, int]:
    assert bias.is_contiguous()
    return weight, bias.data_ptr(), DTYPES[bias.dtype]


def _is_supported(w: WeightTensor) -> bool:
    if w.encoding not in _CODES:
        return False
    parts = (w.data, w.scales, w.zeros, w.minima)
    if len(w.shape) != 2 or any(part is not None and not part.is_contiguous() for part in parts):
        return False
    if w.encoding in (Encoding.INT8_CHANNEL, Encoding.INT8_GROUP):
        return w.activations is Activations.FLOAT or w.shape[1] <= _MOST_INT8_COLUMNS
    return w.encoding.packing is not Packing.PANELS or w.group_size in _INT4_GROUPS


def _describe(native: ModuleType, w: WeightTensor) -> Any:
    rows, columns = w.shape
    tile = w.tile if w.encoding is Encoding.FP8_BLOCK else (1, w.group_size or max(1, columns))
    return native.make_weight(
        _CODES[w.encoding],
        _PACKINGS[w.encoding.packing],
        rows,
        columns,
        w.data.data_ptr(),
        0 if w.scales is None else _SCALES[w.scales.dtype],
        _address(w.scales),
        *tile,
        _address(w.zeros),
        _address(w.minima),
        1.0 if w.factor is None else float(w.factor),
        w.activations.are_integers,
        _SCALE_COLUMNS.get(w.activations, 0),
        _address(_grid(w.encoding)),
    )


@cache
def _grid(encoding: Encoding) -> Tensor | None:
    """The tables of an IQ type as csrc/linear/weight.h has them; kept, as weights refer to them."""
    if encoding not in _WITH_GRIDS:
        return None
    entries = gguf_blocks.grid(_WITH_GRIDS[encoding])
    ternary = _WITH_GRIDS[encoding] is Encoding.IQ1_S
    numbers = 8 * entries + 8 if ternary else entries.view(torch.uint8) + 128
    ranks = torch.searchsorted(entries.unique(), entries)
    parts = [numbers.view(torch.uint8), *(_packed(half) for half in ranks.chunk(2, 1))]
    if entries.shape[1] == 8:
        parts.append(_packed(ranks.view(-1, 2), 2))
    return torch.cat([part.flatten() for part in parts]).contiguous()


def _packed(ranks: Tensor, first: int = 0) -> Tensor:
    """Those of a row in one byte from bit `first` on, two bits each, or three of two."""
    bits = 3 if int(ranks.max()) > 3 else 2
    places = 1 << (bits * torch.arange(ranks.shape[1]) + first)
    return (ranks * places).sum(1).to(torch.uint8)


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()
