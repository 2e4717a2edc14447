"""A device that is the CPU: the same order of things, without the hardware.

Everything that the tier does, except kernels for a real device, runs and is tested on it.  Copies
are late on purpose: their bytes arrive when somebody follows or waits for their mark, or that of a
later copy, and until then the target holds NaN, so that what is used too early shows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hmt.memory.device.coalesced_copy import joined
from hmt.memory.device.interface import (
    CapturedStep,
    CopyEvent,
    Event,
    GraphSegment,
    InlineRecorder,
    SegmentKind,
    SegmentRecorder,
)

POISON = 0xFF  # NaN in every float dtype


class _FakeEvent:
    """Implements Mark: what is done when it is waited for."""

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work

    def reached(self) -> bool:
        """See Mark."""
        return self._work is None

    def wait(self) -> None:
        """See Mark."""
        if self._work is not None:
            work, self._work = self._work, None
            work()


class _FakeCopy(_FakeEvent):
    """Implements Copy: those that were put on the queue before arrive before."""

    def __init__(self, work: Callable[[], object], before: "Sequence[_FakeEvent]") -> None:
        super().__init__(work)
        self._before = before

    def wait(self) -> None:
        """See Mark."""
        before, self._before = self._before, ()
        for copy in before:
            copy.wait()
        super().wait()

    def elapsed_s(self) -> float:
        """See Copy."""
        return 0.0


class FakeDevice:
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

    def used_bytes(self) -> int:
        """See Device."""
        return self._taken

    def reserved_bytes(self) -> int:
        """See Device."""
        return self._taken

    def empty_cache(self) -> None:
        """See Device: nothing is kept."""

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """See Device: host memory is not limited by torch."""
        yield

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See Device."""
        self._taken += nbytes
        whole = torch.full((nbytes + 256,), POISON, dtype=torch.uint8)
        begin = -whole.data_ptr() % 256
        return whole[begin : begin + nbytes]

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """See Device."""
        yield

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None
    ) -> CopyEvent:
        """See Device."""
        return self.copy_each((target,), (source,), () if after is None else (after,))

    def copy_each(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: Iterable[Event] = (),
    ) -> CopyEvent:
        """See Device."""
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

    def record_event(self) -> Event:
        """See Device."""
        return _FakeEvent()

    def wait_event(self, mark: Event) -> None:
        """See Device."""
        mark.wait()

    def write_back(self, work: Callable[[], None]) -> Event:
        """See Device: done when it is waited for."""
        written = _FakeEvent(work)
        self._under_way.append(written)
        return written

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        """See Device: one segment, which does the work itself every time."""

        def run() -> None:
            captured.result = compute()

        segment = GraphSegment(SegmentKind.DEVICE_GRAPH, run)
        captured = CapturedStep((segment,), torch.empty(0))
        return captured

    def capture_segments(self, compute: Callable[[SegmentRecorder], torch.Tensor]) -> CapturedStep:
        """See Device: one segment as well, which the CPU's part is in."""
        return self.capture(lambda: compute(InlineRecorder()))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        """See Device."""
        while self._under_way:
            self._under_way.pop(0).wait()

    def pin(self, memory: torch.Tensor) -> bool:
        """See Device."""
        return True

    def address(self, memory: torch.Tensor) -> int:
        """See Device."""
        return memory.data_ptr()

    def unpin(self, memory: torch.Tensor) -> None:
        """See Device."""

    def close(self) -> None:
        """See Device."""
        self.synchronize()
