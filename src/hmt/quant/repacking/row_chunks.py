"""A weight's rows some at a time, so that little memory is taken on the way."""

from collections.abc import Iterator
from math import prod

from hmt.base.units import round_up
from hmt.contracts.encoding import PANEL_ROWS, WeightTensor
from hmt.quant.packed import row_slice

# What is made of so many numbers at once stays in the cache; a few copies of them are alive.
_NUMBERS = 1 << 18


def row_chunks(target: WeightTensor) -> Iterator[tuple[slice, WeightTensor]]:
    """Rows of `target`, in whole panels, and a view of them."""
    rows, *columns = target.shape
    step = round_up(max(1, _NUMBERS // max(1, prod(columns))), PANEL_ROWS)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        yield slice(first, end), row_slice(target, first, end)
