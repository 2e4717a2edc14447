"""Who is admitted next: a queue that is fair to owners and starves none.

Pure data: no clock, no threads.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 8  # times that an entry is passed over before its turn comes all the same
_LOOKED_AT = 16  # entries of one owner, of which one may go first


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    cost: int
    number: int  # in order of arrival
    passed: int = 0  # times that later ones of the same owner and priority went before


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A request that was admitted, and the place that it had in the queue."""

    owner: str
    priority: int
    entry: _Entry[T]


@dataclass(slots=True)
class _Flow(Generic[T]):
    """What one owner has waiting at one priority.  `start` is the virtual time of its next."""

    entries: list[_Entry[T]] = field(default_factory=list)
    start: int = 0


@dataclass(slots=True)
class _Level(Generic[T]):
    """One priority.  `passed` counts admissions from higher ones since it last had its turn."""

    flows: dict[str, _Flow[T]] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)  # owners that wait no more: their next start
    now: int = 0
    passed: int = 0

    def next(
        self, ready: Callable[[T], bool], shared: Callable[[T], int], patience: int
    ) -> _Entry[T] | None:
        """Of the owners whose first entry is ready, the next of the one that has had least."""
        able = [flow for flow in self.flows.values() if ready(flow.entries[0].item)]
        if not able:
            return None
        flow = min(able, key=lambda one: (one.start, one.entries[0].number))
        some = [entry for entry in flow.entries[:_LOOKED_AT] if ready(entry.item)]
        if len(some) == 1:
            return some[0]
        shares = [shared(entry.item) for entry in some]
        return some[first_of(shares, some[0].passed, patience)]


def first_of(shares: Sequence[int], passed: int, patience: int = PATIENCE) -> int:
    """Which of an owner's entries goes first, by their place in order of arrival.

    shares   how much each has in common with what is in memory; the largest goes first, of equal
             ones who came first
    passed   how often the first was passed over: after `patience` times it is its turn
    """
    if passed >= patience:
        return 0
    return max(range(len(shares)), key=lambda place: (shares[place], -place))


class RequestQueue(Generic[T]):
    """Entries with an owner, a priority and a cost.

    The highest priority goes first, but a lower one that was passed over `patience` times has its
    turn.  Among owners of one priority the one whose admitted entries have cost least goes next
    (start-time fair queueing: Goyal, Vin and Cheng, 1996), and idle owners save nothing up: of two
    owners that both wait, neither is ahead by more than the dearest entry of each.  Of one owner's
    entries at one priority who shares most with what is in memory goes first, but nobody is passed
    over more than `patience` times; else they keep their order.
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

    def head(
        self,
        ready: Callable[[T], bool] = lambda item: True,
        shared: Callable[[T], int] = lambda item: 0,
    ) -> T | None:
        """Who is next; None: nobody whose owner's first entry is `ready`.

        shared   how many tokens an entry has in common with what is in memory
        """
        found = [
            (priority, entry)
            for priority, level in sorted(self._levels.items(), reverse=True)
            if (entry := level.next(ready, shared, self._patience)) is not None
        ]
        if not found:
            return None
        patient = [one for one in found if self._levels[one[0]].passed >= self._patience]
        if patient:
            return max(patient, key=lambda one: self._levels[one[0]].passed)[1].item
        return found[0][1].item

    @property
    def priority(self) -> int | None:
        """The highest of those who wait; None: nobody does."""
        return max((priority for priority, _, _ in self._flows()), default=None)

    def take(self, item: T) -> Taken[T]:
        """Take out `item`, which is admitted: it counts for its owner."""
        priority, owner = self._place(item)
        level = self._levels[priority]
        flow = level.flows[owner]
        place = next(at for at, entry in enumerate(flow.entries) if entry.item is item)
        taken = flow.entries[place]
        for entry in flow.entries[:place]:
            entry.passed += 1
        level.now = max(level.now, flow.start)
        flow.start += taken.cost
        for lower, other in self._levels.items():
            if lower < priority and other.flows:
                other.passed += 1
        level.passed = 0
        self._drop(priority, owner, taken)
        return Taken(owner, priority, taken)

    def restore(self, taken: Taken[T]) -> None:
        """Queue somebody again who was admitted and sent back, where they were before.

        They do not count for their owner any more.
        """
        level, entry = self._levels.setdefault(taken.priority, _Level()), taken.entry
        if taken.owner not in level.flows:
            level.flows[taken.owner] = _Flow(start=level.idle.pop(taken.owner, level.now))
        flow = level.flows[taken.owner]
        flow.start -= entry.cost
        insort(flow.entries, entry, key=lambda one: one.number)

    def remove(self, item: T) -> None:
        """Take out `item`, which is not admitted; nothing happens where it is not there."""
        place = self._place_of(item)
        if place is None:
            return
        flow = self._levels[place[0]].flows[place[1]]
        self._drop(*place, next(entry for entry in flow.entries if entry.item is item))

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
