"""Some rows of a weight as a weight of their own."""

from dataclasses import replace

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.weight_cache import WeightCache

_ROWS: WeightCache[dict[tuple[int, int], WeightTensor]] = WeightCache()


def rows_together(weight: WeightTensor) -> int:
    """Rows that share bytes, or a scale, with others."""
    return weight.tile[0] if weight.encoding is Encoding.FP8_BLOCK else weight.encoding.panel_rows


def rows_of(weight: WeightTensor, first: int, end: int) -> WeightTensor:
    """Rows first .. end - 1 of a weight, without a copy, the same object in every call.

    Both are multiples of `rows_together`, or `end` is the last row.
    """
    if (first, end) == (0, weight.shape[0]):
        return weight
    known = _ROWS.get(weight)
    if known is None:
        known = _ROWS[weight] = {}
    part = known.get((first, end))
    if part is None:
        part = known[first, end] = _view(weight, first, end)
    return part


def _view(weight: WeightTensor, first: int, end: int) -> WeightTensor:
    together = weight.encoding.panel_rows
    rows = slice(first // together, -(-end // together))
    tile = weight.tile[0] or 1
    tiles = slice(first // tile, -(-end // tile))
    by_tile = weight.encoding is Encoding.FP8_BLOCK
    parts = (weight.data, weight.zeros, weight.minima)
    data, zeros, minima = (None if part is None else part[rows] for part in parts)
    scales = None if weight.scales is None else weight.scales[tiles if by_tile else rows]
    shape = (end - first, *weight.shape[1:])
    assert data is not None
    return replace(weight, shape=shape, data=data, scales=scales, zeros=zeros, minima=minima)
