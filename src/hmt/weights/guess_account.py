"""What reads on a guess gained and cost: which were needed, and which needs they were in front of.

Counted in bytes of the drive's time.  A guess that is needed gains what had been read of it when
the need was known; a need that begins while a guess is being read waits for what the drive is
busy with.
"""

import time
from dataclasses import dataclass

from hmt.base.units import MIB
from hmt.contracts.blocks import BlockId

# Of a read that has begun: what the drive works on at once.  The rest of a guess lets needs pass.
_IN_FLIGHT_BYTES = 16 * MIB


@dataclass(slots=True)
class GuessCounters:
    """Sums since the store was made.

    begun           blocks whose read began on a guess
    in_time, late   of them: needed when they were in memory; needed while they were being read
    unneeded_bytes  of those that nobody has needed so far
    gained_bytes    read before the need was known
    delayed_bytes   that needs waited for because a guess was on the drive
    saved_s         gained less delayed bytes, at the rate of the drive as it was seen then
    """

    begun: int = 0
    in_time: int = 0
    late: int = 0
    unneeded_bytes: int = 0
    gained_bytes: float = 0.0
    delayed_bytes: float = 0.0
    saved_s: float = 0.0


@dataclass(slots=True)
class _Guess:
    nbytes: int
    begun_s: float
    loaded: bool = False
    charged: bool = False  # with the delay of a need


class GuessAccount:
    """Follows each guess from its read to its use.  Not thread-safe: the store holds its lock."""

    def __init__(self) -> None:
        self.counters = GuessCounters()
        self._open: dict[BlockId, _Guess] = {}
        self._loading: dict[BlockId, int] = {}  # all loads, not guesses alone: bytes
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._loaded_bytes = 0

    @property
    def rate(self) -> float:
        """Bytes per second of blocks, while any was being loaded; 0 before the first."""
        return self._loaded_bytes / self._busy_s if self._busy_s else 0.0

    def load_begins(self, block: BlockId, nbytes: int, *, guess: bool, needed: bool) -> None:
        """A read of `block` begins: on a guess, or because it is needed, or else ahead of it."""
        now = time.perf_counter()
        if not self._loading:
            self._busy_since_s = now
        self._loading[block] = nbytes
        if guess:
            self.counters.begun += 1
            self.counters.unneeded_bytes += nbytes
            self._open[block] = _Guess(nbytes, now)
        elif needed and self._open:
            self._charge_delay(now)

    def load_ends(self, block: BlockId, *, failed: bool) -> None:
        """The read of `block` has ended."""
        nbytes = self._loading.pop(block)
        self._loaded_bytes += 0 if failed else nbytes
        if not self._loading:
            self._busy_s += time.perf_counter() - self._busy_since_s
        if (guess := self._open.get(block)) is not None:
            guess.loaded = True
            if failed:
                self.dropped(block)

    def needed(self, block: BlockId) -> None:
        """`block` is needed.  Counts when its read was a guess and nobody had needed it yet."""
        guess = self._open.pop(block, None)
        if guess is None:
            return
        self.counters.unneeded_bytes -= guess.nbytes
        if guess.loaded:
            self.counters.in_time += 1
            gained = float(guess.nbytes)
        else:
            self.counters.late += 1
            gained = self._read_so_far(guess, time.perf_counter())
        self.counters.gained_bytes += gained
        self._save(gained)

    def dropped(self, block: BlockId) -> None:
        """`block` is no longer in memory: when it is needed, no guess will have helped."""
        self._open.pop(block, None)

    def _charge_delay(self, now: float) -> None:
        """A need begins: it waits for what is in flight of guesses, each guess counted once."""
        left = 0.0
        for guess in self._open.values():
            if not guess.loaded and not guess.charged:
                guess.charged = True
                left += guess.nbytes - self._read_so_far(guess, now)
        delayed = min(left, _IN_FLIGHT_BYTES)
        self.counters.delayed_bytes += delayed
        self._save(-delayed)

    def _read_so_far(self, guess: _Guess, now: float) -> float:
        """An estimate: the drive gives all its rate to one block."""
        return min(guess.nbytes, (now - guess.begun_s) * self.rate)

    def _save(self, nbytes: float) -> None:
        if self.rate:
            self.counters.saved_s += nbytes / self.rate
