"""What adapters add to the products of some rows."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hmt.contracts.adapter import AdapterRows, LowRank
from hmt.kernels.reference import matmul


class _Reference:
    """The operations that this is made of."""

    linear = staticmethod(matmul.linear)


def add_low_rank(
    out: Tensor,
    x: Tensor,
    rows: AdapterRows,
    low_rank: Mapping[int, LowRank],
    kernels: Any = _Reference,
) -> None:
    """out += scale * up(down(x)) for the rows of each adapter, in f32, rounded to out.dtype once.

    x [tokens, in] and out [tokens, out], perhaps columns of a larger tensor, have the adapters
    `rows`; of these, others than in `low_rank` add nothing.  `out` changes.
    """
    for number in rows.present:
        part = low_rank.get(number)
        if part is None:
            continue
        where = rows.of(number, x.device)
        added = kernels.linear(kernels.linear(x[where].float(), part.down), part.up)
        out[where] = (out[where].float() + added * part.scale).to(out.dtype)
