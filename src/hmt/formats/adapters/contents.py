"""What the file of an adapter has, in either format."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hmt.base.errors import AdapterError, ShapeError
from hmt.contracts.checkpoint import TensorRecord

MOST_RANK: Final = 256
FLOATS: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """What an adapter adds to one linear layer: scale * up(down(x)).

    module   the layer, by the name that its weight has in a checkpoint, without ".weight"
    down     [rank, in]; of one expert of a stack, its part
    up       [out, rank]
    turned   numbers of a head whose rows of `up` lie in llama.cpp's order; else 0
    experts  0; or `module` has the matrices of so many experts in one tensor: `down` has their
             ranks one expert behind the other, and `up` all first ranks before all second ones
    expert   of which of them, from 0 on, `down` is and the columns of `up` are; -1: of all
    """

    module: str
    down: TensorRecord
    up: TensorRecord
    scale: float
    turned: int = 0
    experts: int = 0
    expert: int = -1

    @property
    def rank(self) -> int:
        """Numbers between the two, of one expert where there are several."""
        return self.up.shape[1] // max(1, self.experts)

    def of_expert(self, expert: int, first: int, count: int) -> "AdapterMatrices":
        """Of one expert, and of it the rows [first, first + count) of its outputs."""
        down = self.down.rows(expert * self.rank, self.rank)
        return replace(self, down=down, up=self.up.rows(first, count), expert=expert)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that was opened and whose shapes agree with one another; nothing was read.

    base   the model that it was made for, as the file says; "" where it does not
    """

    path: Path
    matrices: tuple[AdapterMatrices, ...]
    base: str = ""


def checked(matrices: AdapterMatrices, path: Path) -> AdapterMatrices:
    """The same.  Raises ShapeError or AdapterError for what cannot be multiplied."""
    down, up = matrices.down, matrices.up
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        raise ShapeError(
            f"{path}: {down.name!r} is {list(down.shape)} and {up.name!r} {list(up.shape)}; wanted "
            "are [rank, in] and [out, rank]"
        )
    if not 0 < matrices.rank <= MOST_RANK:
        raise AdapterError(
            f"{path}: {down.name!r} has rank {matrices.rank}; HMT computes ranks of 1 to "
            f"{MOST_RANK}"
        )
    for record in (down, up):
        if record.dtype not in FLOATS:
            raise AdapterError(
                f"{path}: {record.name!r} is {record.dtype}; HMT reads adapters in "
                f"{', '.join(FLOATS)}: convert it"
            )
    return matrices
