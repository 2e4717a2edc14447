"""What the tier of a device's memory is built on.

Work is put on three queues of the device, which run beside each other and beside the CPU:
`compute`, for kernels, `copies`, for what comes from host memory, and `write-back`, for what goes
there.  A mark is a place in a queue; another queue can be made to wait for it without the CPU
waiting.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class SegmentKind(enum.Enum):
    """What a segment of a captured step is."""

    DEVICE_GRAPH = "device graph"  # puts captured kernels on the compute queue
    HOST_CALL = "host call"  # the CPU's part
    WAIT = "wait"  # lets the compute queue wait for a copy; takes the CPU no time


@dataclass(frozen=True, slots=True)
class GraphSegment:
    """A part of a captured step, which `run` does each time that the step is replayed."""

    kind: SegmentKind
    run: Callable[[], None]


@dataclass(slots=True)
class CapturedStep:
    """What a device has captured: segments, to be run in order.

    result   what the last one leaves, written anew by each replay
    """

    segments: tuple[GraphSegment, ...]
    result: torch.Tensor

    def replay(self) -> torch.Tensor:
        """Run all segments; their result."""
        for segment in self.segments:
            segment.run()
        return self.result


class SegmentRecorder(Protocol):
    """Who takes down the segments of a step while it is captured."""

    def host_call(self, work: Callable[[], None]) -> None:
        """End a device graph.  Each replay does `work`, once what is before it is on the queue."""
        ...

    def wait(self, work: Callable[[], None]) -> None:
        """The same of `work` that only lets the compute queue wait."""
        ...


class InlineRecorder:
    """Implements SegmentRecorder where nothing is captured: does all work at once."""

    def host_call(self, work: Callable[[], None]) -> None:
        """Do `work` now."""
        work()

    def wait(self, work: Callable[[], None]) -> None:
        """Do `work` now."""
        work()


class Event(Protocol):
    """A place in a queue."""

    def reached(self) -> bool:
        """Whether all that was put on the queue before has been done."""
        ...

    def wait(self) -> None:
        """Let the calling thread wait until it is reached."""
        ...


class CopyEvent(Event, Protocol):
    """The end of a copy."""

    def elapsed_s(self) -> float:
        """How long it took from its beginning, once it is reached; 0 where that is not measured."""
        ...


class Device(Protocol):
    """One device.  For one thread, but for `free_bytes` and `used_bytes`.

    name     for people
    where    what torch calls it; tensors of its memory live there
    pci      its address, such as "0000:18:00.0"; "" where that is not known
    """

    name: str
    pci: str
    where: torch.device

    def free_bytes(self) -> int:
        """Memory that no process uses, as the driver counts it."""
        ...

    def used_bytes(self) -> int:
        """Memory that this process has taken, the driver's own share included."""
        ...

    def reserved_bytes(self) -> int:
        """Of those, what torch has for tensors and their next ones: the rest is the driver's."""
        ...

    def empty_cache(self) -> None:
        """Give back what torch keeps for the next allocation."""
        ...

    def limited(self, nbytes: int) -> AbstractContextManager[None]:
        """In the body torch takes up to `nbytes` more, with what it keeps for later tensors.

        What is kept is given back before more is taken.  Raises BudgetError where tensors alone
        are more.
        """
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory, uint8 [nbytes], at an address that is a multiple of 256.

        Raises BudgetError where there is none.
        """
        ...

    def compute_stream(self) -> AbstractContextManager[None]:
        """Kernels that are called in the body go on the compute queue."""
        ...

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event | None = None
    ) -> CopyEvent:
        """Copy host memory to the device's, both uint8 [n]; reached when it is there.

        Begins when `after`, a place on the compute queue, has been reached.  `source` must stay as
        it is until then, and be pinned for the copy to run beside the CPU.
        """
        ...

    def copy_each(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: Iterable[Event] = (),
    ) -> CopyEvent:
        """`copy`, of each to its target, one behind the other; reached when all are there.

        For many small ones: beginning and end are noted once.
        """
        ...

    def record_event(self) -> Event:
        """The end of the compute queue now."""
        ...

    def wait_event(self, mark: Event) -> None:
        """What is put on the compute queue from now on begins when `mark` has been reached."""
        ...

    def write_back(self, work: Callable[[], None]) -> Event:
        """What `work` launches goes on the write-back queue; reached when it has been done.

        Begins when what is on the compute queue now has been done.  `work` may be called later, but
        not after the mark was waited for.
        """
        ...

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        """What `compute` puts on the compute queue, as one segment.

        `compute` has been called before, waits for nothing, and reads and writes tensors that stay
        where they are.
        """
        ...

    def capture_segments(self, compute: Callable[[SegmentRecorder], torch.Tensor]) -> CapturedStep:
        """Like `capture`, of work in which the CPU has a part.

        `compute` tells the recorder of that part, at its place among what is captured.  It is not
        done now, but by each replay.
        """
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device's kernels can read and write."""
        ...

    def synchronize(self) -> None:
        """Wait until all queues are empty."""
        ...

    def pin(self, memory: torch.Tensor) -> bool:
        """Keep host memory, uint8 [n], where it is, for copies; False where that is refused."""
        ...

    def address(self, memory: torch.Tensor) -> int:
        """Where kernels of the device find pinned host memory."""
        ...

    def unpin(self, memory: torch.Tensor) -> None:
        """End what `pin` began.  No copy from it may be under way."""
        ...

    def close(self) -> None:
        """Wait until all queues are empty, and `trim`."""
        ...
