"""What adapters add to the products of some rows."""

from torch import Tensor

from hmt.contracts.adapter import AdaptedWeight


def add_low_rank(out: Tensor, x: Tensor, w: AdaptedWeight) -> None:
    """out += scale * up(down(x)) for the rows of each adapter, in f32, rounded to out.dtype once.

    x [tokens, in] and out [tokens, out], perhaps columns of a larger tensor, have the adapters
    `w.rows`; of these, others than in `w.low_rank` add nothing.  `out` changes.
    """
    for number in w.rows.present:
        part = w.low_rank.get(number)
        if part is None:
            continue
        where = w.rows.of(number, x.device)
        down, up = (matrix.to(x.device).float() for matrix in (part.down, part.up))
        added = (x[where].float() @ down.T) @ up
        out[where] = (out[where].float() + added * part.scale).to(out.dtype)
