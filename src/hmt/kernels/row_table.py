"""A table whose rows a device looks up by address."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.encoding import Encoding, Packing, WeightTensor


@dataclass(frozen=True, slots=True)
class RowTable:
    """A table whose rows a device looks up: where its parts lie, in memory that it can read.

    parts        addresses of the data, scales, and zeros or minima of each part of the table: int64
                 [parts] each, on the device; 0 for what there is not
    part_rows    rows of each part (the last has fewer)
    width        numbers of a row
    dtype        of the numbers of a table that holds numbers; rows of codes come in f32
    encoding, group_size, scale_dtype   as in WeightTensor
    extra        "zeros", "minima" or ""
    """

    parts: tuple[Tensor, Tensor, Tensor]
    part_rows: int
    width: int
    dtype: torch.dtype
    encoding: Encoding
    group_size: int = 0
    scale_dtype: torch.dtype | None = None
    extra: str = ""


def looks_up(w: WeightTensor) -> bool:
    """Whether `rows_at` takes tables of which w is a part."""
    if w.encoding.is_float or w.encoding.packing is Packing.BLOCKS:
        return True
    return w.encoding in (Encoding.INT4_GROUP, Encoding.MXFP4)
