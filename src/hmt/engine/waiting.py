"""Who is admitted next: a queue that is fair to owners and starves nobody.

Pure data: no clock, no threads.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 8  # times that a lower priority is passed over before its turn comes all the same


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    cost: int
    number: int  # in order of arrival


@dataclass(slots=True)
class _Flow(Generic[T]):
    """What one owner has waiting at one priority.  `start` is the virtual time of its head."""

    entries: deque[_Entry[T]] = field(default_factory=deque)
    start: int = 0


@dataclass(slots=True)
class _Level(Generic[T]):
    """One priority.  `passed` counts admissions from higher ones since it last had its turn."""

    flows: dict[str, _Flow[T]] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)  # owners that wait no more: their next start
    now: int = 0
    passed: int = 0

    def head(self, ready: Callable[[T], bool]) -> tuple[str, _Entry[T]] | None:
        """Of the owners whose first entry is ready, the one that has had least."""
        heads = ((owner, flow.entries[0], flow.start) for owner, flow in self.flows.items())
        able = [(start, entry.number, owner, entry) for owner, entry, start in heads if
                ready(entry.item)]  # fmt: skip
        if not able:
            return None
        _, _, owner, entry = min(able, key=lambda one: one[:2])
        return owner, entry


class WaitingQueue(Generic[T]):
    """Entries with an owner, a priority and a cost.

    The highest priority goes first, but a lower one that was passed over `patience` times has its
    turn.  Among owners of one priority the one whose admitted entries have cost least goes next
    (start-time fair queueing: Goyal, Vin and Cheng, 1996), and idle owners save nothing up: of two
    owners that both wait, neither is ahead by more than the dearest entry of each.  Entries of one
    owner and priority keep their order.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._levels: dict[int, _Level[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return sum(len(flow.entries) for _, _, flow in self._flows())

    def __iter__(self) -> Iterator[T]:
        """All entries, in order of arrival."""
        entries = [entry for _, _, flow in self._flows() for entry in flow.entries]
        return iter([entry.item for entry in sorted(entries, key=lambda entry: entry.number)])

    def add(self, item: T, *, owner: str = "", priority: int = 0, cost: int = 1) -> None:
        """Queue `item`, which will cost at least 1."""
        level = self._levels.setdefault(priority, _Level())
        if owner not in level.flows:
            level.flows[owner] = _Flow(start=max(level.now, level.idle.pop(owner, 0)))
        level.flows[owner].entries.append(_Entry(item, max(1, cost), self._count))
        self._count += 1

    def head(self, ready: Callable[[T], bool] = lambda item: True) -> T | None:
        """Who is next, of those that come first for their owner and are `ready`; None: nobody."""
        found = self._find(ready)
        return None if found is None else found[2].item

    def take(self, item: T) -> None:
        """Take out `item`, which is admitted: it counts for its owner."""
        priority, owner = self._place(item)
        level = self._levels[priority]
        flow = level.flows[owner]
        taken = next(entry for entry in flow.entries if entry.item is item)
        level.now = max(level.now, flow.start)
        flow.start += taken.cost
        for lower, other in self._levels.items():
            if lower < priority and other.flows:
                other.passed += 1
        level.passed = 0
        self._drop(priority, owner, taken)

    def remove(self, item: T) -> None:
        """Take out `item`, which is not admitted; nothing happens where it is not there."""
        place = self._place_of(item)
        if place is None:
            return
        flow = self._levels[place[0]].flows[place[1]]
        self._drop(*place, next(entry for entry in flow.entries if entry.item is item))

    def _find(self, ready: Callable[[T], bool]) -> tuple[int, str, _Entry[T]] | None:
        heads = [
            (priority, *head)
            for priority, level in sorted(self._levels.items(), reverse=True)
            if (head := level.head(ready)) is not None
        ]
        if not heads:
            return None
        patient = [one for one in heads if self._levels[one[0]].passed >= self._patience]
        if patient:
            return max(patient, key=lambda one: self._levels[one[0]].passed)
        return heads[0]

    def _flows(self) -> Iterator[tuple[int, str, _Flow[T]]]:
        for priority, level in self._levels.items():
            for owner, flow in level.flows.items():
                yield priority, owner, flow

    def _place_of(self, item: T) -> tuple[int, str] | None:
        for priority, owner, flow in self._flows():
            if any(entry.item is item for entry in flow.entries):
                return priority, owner
        return None

    def _place(self, item: T) -> tuple[int, str]:
        place = self._place_of(item)
        assert place is not None
        return place

    def _drop(self, priority: int, owner: str, entry: _Entry[T]) -> None:
        """Take an entry out, and forget owners and priorities that have no others."""
        level = self._levels[priority]
        flow = level.flows[owner]
        flow.entries.remove(entry)
        if not flow.entries:
            del level.flows[owner]
            level.idle[owner] = flow.start
            level.idle = {name: start for name, start in level.idle.items() if start > level.now}
        if not level.flows:
            level.passed = 0
