"""How many answers may be under way: those beyond are refused at once, with a time to come back."""

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from hmt.base.errors import Cancelled, HMTError
from hmt.base.units import MIB
from hmt.server.errors import ApiError

_WEIGHT = 0.2  # of the latest answer in the mean of how long answers take

# A token takes 0.4 to 3 kB until it is read.  A client that reads 20 thousand tokens late is cut
# off, and earlier only where all clients together are late.
_OF_ONE_BYTES: Final = 16 * MIB
_OF_ALL_BYTES: Final = 64 * MIB


class Behind(Protocol):
    """A client that has not read all that was written for it."""

    def cut_off(self, error: HMTError) -> None:
        """End it, and say why."""
        ...


@dataclass(slots=True)
class Unread:
    """What was written for clients and waits to be read, on the event loop.

    Bounded by ending the answers of the client that is furthest behind.
    """

    of_one_bytes: int = _OF_ONE_BYTES
    of_all_bytes: int = _OF_ALL_BYTES
    total_bytes: int = 0
    _by_reader: dict[Behind, int] = field(default_factory=dict)

    def add(self, reader: Behind, size: int) -> None:
        """So many bytes more wait for `reader`."""
        waiting = self._by_reader[reader] = self._by_reader.get(reader, 0) + size
        self.total_bytes += size
        if self.total_bytes > self.of_all_bytes:
            reader, waiting = max(self._by_reader.items(), key=lambda item: item[1])
        elif waiting <= self.of_one_bytes:
            return
        reader.cut_off(
            Cancelled(
                f"the answer was read too slowly: {waiting} bytes of it waited, and "
                f"{self.of_one_bytes} may, {self.of_all_bytes} for all clients together"
            )
        )

    def read(self, reader: Behind, size: int) -> None:
        """`reader` has read so many bytes."""
        self._by_reader[reader] -= size
        self.total_bytes -= size

    def drop(self, reader: Behind) -> None:
        """Nothing waits for `reader` any more."""
        self.total_bytes -= self._by_reader.pop(reader, 0)


@dataclass(slots=True)
class ConcurrencyLimit:
    """Counts answers, on the event loop, so that nobody waits to hear that there is no room.

    running    answers that the engine computes at once
    waiting    that may wait besides
    """

    running: int
    waiting: int
    inside: int = 0
    mean_s: float = 1.0  # that an answer takes
    unread: Unread = field(default_factory=Unread)

    def enter(self, answers: int) -> None:
        """Let so many in.  Raises ApiError 429 where there is no room for all of them."""
        most = self.running + self.waiting
        if answers > most:
            raise ApiError(
                400,
                f"{answers} answers were asked for at once; this server has room for {most}",
                param="n",
                code="too_many_answers",
            )
        if self.inside + answers > most:
            seconds = self.retry_after_s
            raise ApiError(
                429,
                f"the server is busy with {self.inside} answers and takes {most}: try again in "
                f"{seconds} s",
                kind="rate_limit_error",
                code="overloaded",
                headers={"Retry-After": str(seconds)},
            )
        self.inside += answers

    def leave(self, answers: int, seconds: float | None = None) -> None:
        """Let so many out, that took so long; None for those that did not end by themselves."""
        self.inside -= answers
        if seconds is not None:
            self.mean_s += _WEIGHT * (seconds - self.mean_s)

    @property
    def retry_after_s(self) -> int:
        """When a place will be free, as far as is known."""
        return min(60, max(1, math.ceil(self.mean_s / self.running)))
