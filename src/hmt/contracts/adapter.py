"""Low-rank adapters (LoRA, arXiv 2106.09685): what is added to products of some of a step's rows.

An adapter is known by a number, from 1 on; 0 stands for none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What one adapter adds to one linear layer: scale * up(down(x)), in f32.

    down         [rank, in], f32, f16 or bf16, contiguous
    up           [rank, out], the same: transposed, so that kernels read it in order
    down_copies  on devices; parts of one layer, which have the same `down`, share them
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    down_copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _up_copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def on(self, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`down` and `up` on a device; kept as long as this."""
        if where not in self._up_copies:
            self._up_copies[where] = self.up.to(where)
        if where not in self.down_copies:
            self.down_copies[where] = self.down.to(where)
        return self.down_copies[where], self._up_copies[where]

    @property
    def rank(self) -> int:
        """Numbers between the two."""
        return self.down.shape[0]

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.down.nbytes + self.up.nbytes


class AdapterRows:
    """Which adapter each row of a step's tensors is computed with."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """`numbers` of adapters, one for each row; 0: none."""
        self.numbers = tuple(numbers)
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(self.numbers):
            if number:
                groups.setdefault(number, []).append(row)
        self._groups = {number: torch.tensor(rows) for number, rows in groups.items()}
        self._places: dict[tuple[int, torch.device], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def present(self) -> Sequence[int]:
        """Adapters that any row has, in the order of their first rows."""
        return tuple(self._groups)

    def of(self, number: int, where: torch.device) -> torch.Tensor:
        """Rows of one adapter, ascending: int64 [rows], on the device `where`."""
        place = number, where
        if place not in self._places:
            self._places[place] = self._groups[number].to(where)
        return self._places[place]

    def chosen(self, rows: torch.Tensor) -> "AdapterRows":
        """The same of some rows (int64 [count]), in their order."""
        return AdapterRows(self.numbers[row] for row in rows.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """Adapters of a step's rows, and what they add.

    parts      by block, parameter and adapter
    described  what kernels that take many blocks made of these, by who made it; kept as long
    """

    rows: AdapterRows
    parts: Mapping[BlockId, Mapping[str, Mapping[int, LowRank]]]
    described: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight(WeightTensor):
    """A linear layer's weight in a step of which some rows have adapters.

    Who multiplies with it as with any weight leaves the adapters out, so `applied` is to be called
    by those that add them.

    base      the weight without adapters; its caches of kernels are its own
    rows      adapters of the step's rows
    low_rank  by adapter, for those that have a part here
    """

    base: WeightTensor | None = None
    rows: AdapterRows = None  # type: ignore[assignment]  # always given
    low_rank: Mapping[int, LowRank] = None  # type: ignore[assignment]
    applied: Callable[[], None] = lambda: None

    @staticmethod
    def of(
        base: WeightTensor,
        rows: AdapterRows,
        low_rank: Mapping[int, LowRank],
        applied: Callable[[], None],
    ) -> "AdaptedWeight":
        """The weight `base` with these adapters."""
        own = {f.name: getattr(base, f.name) for f in fields(WeightTensor) if f.init}
        return AdaptedWeight(**own, base=base, rows=rows, low_rank=low_rank, applied=applied)

    def only(self, rows: AdapterRows) -> "AdaptedWeight":
        """The same for other rows."""
        assert self.base is not None
        return AdaptedWeight.of(self.base, rows, self.low_rank, self.applied)


class AdaptedParams(dict[str, WeightTensor]):
    """A block's parameters, some of which are AdaptedWeight.

    base   all of them without adapters
    rows   of an expert: adapters of the step's rows that have a part in any of its layer's experts
    """

    def __init__(
        self,
        base: Mapping[str, WeightTensor],
        adapted: Mapping[str, AdaptedWeight],
        rows: AdapterRows | None = None,
    ) -> None:
        super().__init__(base)
        self.update(adapted)
        self.base = base
        self.adapted = adapted
        self.rows = rows
