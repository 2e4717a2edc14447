"""A device that is the CPU: the same order of things, without the hardware.

Everything that the tier does, except kernels for a real device, runs and is tested on it.  Copies
are late on purpose: their bytes arrive when somebody follows or waits for their mark, or that of a
later copy, and until then the target holds NaN, so that what is used too early shows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from hmt.memory.device.coalesced_copy import joined
from hmt.memory.device.interface import CopyEvent, Device, Event, GraphBreak

POISON = 0xFF  # NaN in every float dtype


class _FakeEvent(Event):
    """Implements Mark: what is done when it is waited for."""

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work

    @override
    def reached(self) -> bool:
        return self._work is None

    @override
    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work()


class _FakeCopy(_FakeEvent, CopyEvent):
    """Implements Copy: those that were put on the queue before arrive before."""

    def __init__(self, work: Callable[[], object], before: "Sequence[_FakeEvent]") -> None:
        super().__init__(work)
        self._before = before

    @override
    def wait(self) -> None:
        before, self._before = self._before, ()
        for copy in before:
            copy.wait()
        super().wait()

    @override
    def elapsed_s(self) -> float:
        return 0.0


class FakeDevice(Device):
    """Implements Device."""

    def __init__(self) -> None:
        self.name = "a fake device"
        self.pci = ""
        self.where = torch.device("cpu")
        self._taken = 0
        self._under_way: list[_FakeEvent] = []

    def free_bytes(self) -> int:
        """See Device: as much as anybody may ask for."""
        return (1 << 40) - self._taken

    @override
    def used_bytes(self) -> int:
        return self._taken

    @override
    def reserved_bytes(self) -> int:
        return self._taken

    def empty_cache(self) -> None:
        """See Device: nothing is kept."""

    @override
    def allocate(self, nbytes: int) -> torch.Tensor:
        self._taken += nbytes
        whole = torch.full((nbytes + 256,), POISON, dtype=torch.uint8)
        begin = -whole.data_ptr() % 256
        return whole[begin : begin + nbytes]

    @contextmanager
    @override
    def compute_stream(self) -> Iterator[None]:
        yield

    @override
    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None
    ) -> CopyEvent:
        return self.copy_each((target,), (source,), () if after is None else (after,))

    @override
    def copy_each(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: Iterable[Event] = (),
    ) -> CopyEvent:
        pairs = list(zip(targets, sources, strict=True))
        assert all(mark.reached() for mark in after), "the pretended compute queue is never behind"
        assert all(target.shape == source.shape for target, source in pairs)
        for target, _ in pairs:
            target.fill_(POISON)
        self._under_way = [copy for copy in self._under_way if not copy.reached()]
        before = [copy for copy in self._under_way if isinstance(copy, _FakeCopy)]
        together = list(joined(targets, sources))

        def arrive() -> None:
            for target, source in together:
                target.copy_(source)

        copy = _FakeCopy(arrive, before)
        self._under_way.append(copy)
        return copy

    @override
    def record_event(self) -> Event:
        return _FakeEvent()

    @override
    def wait_event(self, mark: Event) -> None:
        mark.wait()

    def write_back(self, work: Callable[[], None]) -> Event:
        """See Device: done when it is waited for."""
        written = _FakeEvent(work)
        self._under_way.append(written)
        return written

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See Device: the work itself, every time."""
        return compute

    def capture_segments(
        self, compute: Callable[[GraphBreak], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """See Device: all of it, every time."""
        return lambda: compute(lambda work: work())

    @override
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    @override
    def synchronize(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()

    @override
    def pin(self, memory: torch.Tensor) -> bool:
        return True

    @override
    def address(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()

    @override
    def unpin(self, memory: torch.Tensor) -> None:
        """Nothing to do."""

    @override
    def close(self) -> None:
        self.synchronize()
