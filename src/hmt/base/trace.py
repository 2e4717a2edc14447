"""What the engine did and when: a ring of events, and running totals of them."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that took time.  `begin_s` and `end_s` are time.perf_counter() seconds.

    kind     "step", "compute", "wait", "read", "verify", "convert"
    where    the tier or link: "disk", "host"
    what     str() of it says what was read, computed or waited for
    """

    kind: str
    where: str
    nbytes: int
    begin_s: float
    end_s: float
    thread: int
    what: object = ""


@dataclass(slots=True)
class Total:
    """Sums over all events of one kind and place since the tracer was made."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tracer:
    """Keeps the last `capacity` events and the totals of all.  Thread-safe."""

    capacity: int = 65536
    _events: deque[Event] = field(init=False)
    _totals: dict[tuple[str, str], Total] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._events = deque(maxlen=self.capacity)

    def record(
        self,
        kind: str,
        where: str,
        nbytes: int,
        begin_s: float,
        end_s: float,
        what: object = "",
    ) -> None:
        """Add one event that has ended; `what` is kept as it is, so it should be small."""
        with self._lock:
            if self.capacity:
                thread = threading.get_ident()
                self._events.append(Event(kind, where, nbytes, begin_s, end_s, thread, what))
            total = self._totals.setdefault((kind, where), Total())
            total.count += 1
            total.nbytes += nbytes
            total.seconds += end_s - begin_s

    @contextmanager
    def span(self, kind: str, where: str, nbytes: int = 0, what: object = "") -> Iterator[None]:
        """Record the time that the body takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record(kind, where, nbytes, begin, time.perf_counter(), what)

    def total(self, kind: str, where: str) -> Total:
        """A copy of the running total; zeros if nothing was recorded."""
        with self._lock:
            total = self._totals.get((kind, where), Total())
            return Total(total.count, total.nbytes, total.seconds)

    def events(self) -> list[Event]:
        """The events still in the ring, oldest first."""
        with self._lock:
            return list(self._events)
