"""Adapters of a loaded model: all by name, and those in memory, within a budget."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hmt.base.errors import AdapterError, BudgetError, RequestError
from hmt.base.units import format_bytes
from hmt.memory import Account
from hmt.weights.adapters.binding import BoundAdapter, Parts

_LONGEST_NAME = 128


class AdapterHold:
    """Keeps an adapter in memory and known for as long as it lives.

    number        by which steps name it
    fingerprint   see BoundAdapter
    """

    __slots__ = ("__weakref__", "fingerprint", "number")

    def __init__(self, number: int, fingerprint: str) -> None:
        self.number = number
        self.fingerprint = fingerprint


@dataclass(slots=True)
class _Known:
    """An adapter by its name.  `parts` is None while it is on the disk alone."""

    number: int
    bound: BoundAdapter
    parts: Parts | None = None
    uses: int = 0
    used_at: int = 0
    loading: threading.Lock = field(default_factory=threading.Lock)


class AdapterStore:
    """Adapters by name.  Thread-safe.

    Their homes are the disk: the files that they were opened from, which must not change.  Those
    that requests use are in memory, and others for as long as there is room; the one that was used
    longest ago leaves first.
    """

    def __init__(self, account: Account, on_devices: Sequence[Account] = ()) -> None:
        """`account` has the memory that they may take together.

        on_devices   have as much, for copies: of an adapter in memory there may be one on each
        """
        self._account = account
        self._on_devices = on_devices
        self._lock = threading.RLock()  # a hold may go while it is taken
        self._known: dict[str, _Known] = {}
        self._by_number: dict[int, _Known] = {}
        self._numbers = 0
        self._clock = 0
        self._watchers: list[Callable[[], None]] = []

    def watch(self, evicted: Callable[[], None]) -> None:
        """Call `evicted`, on any thread, when an adapter leaves memory, to let go of its numbers.

        No step computes with it then.
        """
        self._watchers.append(evicted)

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may name, in the order in which they came."""
        with self._lock:
            return tuple(self._known)

    @property
    def limit_bytes(self) -> int:
        """Memory that those in use may take together."""
        return self._account.limit_bytes

    @property
    def in_memory(self) -> Mapping[str, int]:
        """Bytes of those that are in memory, by name."""
        with self._lock:
            there = ((name, known) for name, known in self._known.items())
            return {name: known.bound.nbytes for name, known in there if known.parts is not None}

    @property
    def in_use(self) -> bool:
        """Whether any is held."""
        with self._lock:
            return any(known.uses for known in self._known.values())

    def describe(self, name: str) -> BoundAdapter:
        """What is known of an adapter.  Raises RequestError where there is none of the name."""
        with self._lock:
            return self._find(name).bound

    def add(self, name: str, bound: BoundAdapter) -> None:
        """Let requests name it.  Raises AdapterError, or BudgetError where it can never fit."""
        if not name or len(name) > _LONGEST_NAME or not name.isprintable() or ":" in name:
            raise AdapterError(
                f"an adapter cannot be called {name[:_LONGEST_NAME]!r}: give 1 to {_LONGEST_NAME} "
                "characters without a colon"
            )
        if bound.nbytes > self.limit_bytes:
            raise BudgetError(
                f"the adapter {name!r} takes {format_bytes(bound.nbytes)}, and adapters may have "
                f"{format_bytes(self.limit_bytes)} of memory: give more with --adapter-memory"
            )
        with self._lock:
            if name in self._known:
                raise AdapterError(f"there is an adapter {name!r} already: unload it first")
            self._numbers += 1
            known = self._known[name] = _Known(self._numbers, bound)
            self._by_number[known.number] = known

    def remove(self, name: str) -> None:
        """Forget one, and free its memory.

        Raises RequestError where there is none, AdapterError while requests use it.
        """
        with self._lock:
            known = self._find(name)
            if known.uses:
                raise AdapterError(
                    f"{known.uses} requests use the adapter {name!r}: wait until they have ended"
                )
            self._evict(known)
            del self._known[name], self._by_number[known.number]

    def hold(self, name: str) -> AdapterHold:
        """Have an adapter in memory, which it does not leave as long as the hold.

        Reads it on the calling thread where it is not.  Raises RequestError where there is none of
        this name, BudgetError where others in use leave no room, DiskReadError, AdapterError where
        its file has changed.
        """
        with self._lock:
            known = self._find(name)
            known.uses += 1
            self._clock += 1
            known.used_at = self._clock
        hold = AdapterHold(known.number, known.bound.fingerprint)
        weakref.finalize(hold, self._release, known).atexit = False
        with known.loading:
            if known.parts is None:
                self._load(name, known)
        return hold

    def parts(self, number: int) -> Parts:
        """What an adapter that is held adds."""
        found = self._by_number[number].parts
        assert found is not None, "a step has an adapter that is not held"
        return found

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            for known in self._known.values():
                self._evict(known)

    def _find(self, name: str) -> _Known:
        found = self._known.get(name)
        if found is None:
            names = ", ".join(map(repr, self._known)) or "none"
            raise RequestError(f"there is no adapter {name[:_LONGEST_NAME]!r}; there are {names}")
        return found

    def _load(self, name: str, known: _Known) -> None:
        nbytes = known.bound.nbytes
        with self._lock:
            unused = (k for k in self._known.values() if k.parts is not None and not k.uses)
            leaving = sorted(unused, key=lambda k: k.used_at)
            while not self._account.try_charge(nbytes):
                if not leaving:
                    raise BudgetError(
                        f"the adapter {name!r} takes {format_bytes(nbytes)} of the "
                        f"{format_bytes(self.limit_bytes)} for adapters, of which requests use "
                        f"{format_bytes(self._account.used_bytes)}: try again later, or give more "
                        "with --adapter-memory"
                    )
                self._evict(leaving.pop(0))
        try:
            known.parts = known.bound.read()
        except BaseException:
            self._account.release(nbytes)
            raise
        for account in self._on_devices:
            account.charge(nbytes)

    def _evict(self, known: _Known) -> None:
        if known.parts is not None:
            known.parts = None
            for evicted in self._watchers:
                evicted()
            for account in (self._account, *self._on_devices):
                account.release(known.bound.nbytes)

    def _release(self, known: _Known) -> None:
        with self._lock:
            known.uses -= 1
