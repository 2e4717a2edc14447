"""What adapters add, through the compiled extension: all rows and adapters in one call.

A row's result depends on nothing but the row and its adapter, to the bit.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.adapter import AdaptedWeight, AdapterRows, LowRank
from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.weight_cache import WeightCache

# The extension's own description of a weight's adapters and their rows, which the weight holds.
_LOW_RANKS: WeightCache[Any] = WeightCache()


def add_low_rank(native: ModuleType, out: Tensor, x: Tensor, w: AdaptedWeight) -> None:
    """`reference.add_low_rank`."""
    if x.dtype not in DTYPES or out.dtype not in DTYPES or out.stride(1) != 1:
        reference.add_low_rank(out, x, w)
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    made = _LOW_RANKS.get(w)
    if made is None:
        made = _LOW_RANKS[w] = describe_low_ranks(native, w.rows, w.low_rank)
    native.add_low_rank(
        made,
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        x.stride(0),
        out.data_ptr(),
        DTYPES[out.dtype],
        out.shape[1],
        out.stride(0),
        torch.get_num_threads(),
    )


def describe_low_ranks(
    native: ModuleType, each_row: AdapterRows, low_rank: Mapping[int, LowRank]
) -> Any:
    """The extension's own description, which borrows the memory of both."""
    made = native.LowRanks()
    for number in each_row.present:
        part = low_rank.get(number)
        if part is not None:
            rows = each_row.of(number, part.down.device)
            down, up = part.down, part.up
            made.add(
                rows.data_ptr(),
                len(rows),
                down.data_ptr(),
                DTYPES[down.dtype],
                up.data_ptr(),
                DTYPES[up.dtype],
                part.rank,
                part.scale,
            )
    return made
