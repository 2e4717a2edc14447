"""A block as the store keeps it."""

import enum
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hmt.base.errors import HMTError
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import Priority
from hmt.memory import HostBuffer
from hmt.weights.layout import BlockLayout
from hmt.weights.store.block_load import BlockLoad


class State(enum.Enum):
    """Whether a block is in memory."""

    ABSENT = enum.auto()
    LOADING = enum.auto()
    READY = enum.auto()


@dataclass(slots=True)
class BlockState:
    """Guarded by the store's lock.

    stays   whether it is loaded once and stays; else it passes through slots
    """

    layout: BlockLayout
    stays: bool
    state: State = State.ABSENT
    views: Mapping[str, WeightTensor] = field(default_factory=dict)
    slot: HostBuffer | None = None
    staging: HostBuffer | None = None
    load: BlockLoad | None = None
    error: HMTError | None = None
    leases: int = 0
    uses: int = 0  # leases until now
    waiting: int = 0  # leases that wait for it
    awaited: Priority | None = None  # as what it was requested ahead, and is not leased yet
    urgent: bool = False  # it is being read, and not on a guess alone
    checked: bool = False  # its numbers were seen to be finite, or to be those that were packed
    # Of a resident that has been loaded: it never moves, so its lease needs no lock, which would
    # cost more than a small kernel takes.
    resident: AbstractContextManager[Mapping[str, WeightTensor]] | None = None


def block_states(
    layouts: Mapping[BlockId, BlockLayout],
    stays: Collection[BlockId],
) -> dict[BlockId, BlockState]:
    """An entry for each block; those of `stays` are loaded once and stay."""
    staying = frozenset(stays)
    return {block: BlockState(layout, block in staying) for block, layout in layouts.items()}
