"""A CUDA device, through torch."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hmt.base.errors import BudgetError, MachineError
from hmt.base.units import format_bytes
from hmt.memory.device.coalesced_copy import joined
from hmt.memory.device.interface import (
    CapturedStep,
    CopyEvent,
    Event,
    GraphSegment,
    SegmentKind,
    SegmentRecorder,
)
from hmt.memory.device.nvml import ProcessMemory

_PORTABLE_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _CudaEvent:
    """Implements Mark with an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def reached(self) -> bool:
        """See Mark."""
        return self.event.query()

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()


class _CudaCopyEvent(_CudaEvent):
    """Implements Copy with an event at either end."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        super().__init__(end)
        self._begin = begin

    def elapsed_s(self) -> float:
        """See Copy."""
        return self._begin.elapsed_time(self.event) * 1e-3


class _CudaRecorder:
    """Implements SegmentRecorder: a graph ends where another segment comes, and the next begins."""

    def __init__(self, pool: Any) -> None:
        """`pool` is what torch calls one; see `graph_pool_handle`."""
        self.segments: list[GraphSegment] = []
        self.graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        """Capture into the graph."""
        self.graph.capture_begin(pool=self._pool)

    def end(self) -> None:
        """Make the graph a segment."""
        self.graph.capture_end()
        self.segments.append(GraphSegment(SegmentKind.DEVICE_GRAPH, self.graph.replay))

    def host_call(self, work: Callable[[], None]) -> None:
        self._put_between(GraphSegment(SegmentKind.HOST_CALL, work))

    def wait(self, work: Callable[[], None]) -> None:
        self._put_between(GraphSegment(SegmentKind.WAIT, work))

    def _put_between(self, segment: GraphSegment) -> None:
        self.end()
        self.segments.append(segment)
        self.graph = torch.cuda.CUDAGraph()
        self.begin()


def _pci_address(properties: object) -> str:
    """As sysfs writes it; "" where torch does not tell, as before 2.5."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = (part if isinstance(part, int) else -1 for part in parts)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0" if min(domain, bus, device) >= 0 else ""


class CudaDevice:
    """Implements Device."""

    def __init__(self, name: str) -> None:
        """`name` is what torch calls it.  Raises MachineError where torch cannot use it."""
        try:
            self.where = torch.device(name)
            torch.cuda.init()
            properties = torch.cuda.get_device_properties(self.where)
        except (RuntimeError, AssertionError) as error:
            raise MachineError(
                f"the GPU {name} cannot be used ({error}): hmt doctor says what this machine has; "
                "without --gpu-memory everything is computed on the CPU"
            ) from error
        self.name = properties.name
        self.pci = _pci_address(properties)
        self._process = ProcessMemory(str(properties.uuid))
        self._free_at_start = torch.cuda.mem_get_info(self.where)[0]
        with torch.cuda.device(self.where):
            self._compute = torch.cuda.Stream()
            # Copies give way: a kernel that waits costs more than a copy that does.
            self._copies = torch.cuda.Stream()
            self._writes = torch.cuda.Stream()
            self._graphs = torch.cuda.graph_pool_handle()

    def free_bytes(self) -> int:
        """See Device."""
        return torch.cuda.mem_get_info(self.where)[0]

    def used_bytes(self) -> int:
        """See Device.

        Where the driver does not tell by process: what is gone since the device was opened, plus
        the context's share.
        """
        known = self._process.used_bytes()
        if known is not None:
            return known
        free, total = torch.cuda.mem_get_info(self.where)
        return min(total, self._context_bytes() + self._free_at_start - free)

    def reserved_bytes(self) -> int:
        """See Device."""
        return int(torch.cuda.memory_reserved(self.where))

    def empty_cache(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """See Device."""
        total = torch.cuda.mem_get_info(self.where)[1]
        share = min(1.0, (self.reserved_bytes() + nbytes) / total)
        torch.cuda.set_per_process_memory_fraction(share, self.where)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{format_bytes(nbytes)} of {self.name} were given for this, and do not hold it "
                f"({str(error).splitlines()[0]}): give more of --gpu-memory, or less to do at once"
            ) from error
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.where)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See Device."""
        try:
            # torch aligns to 512 bytes.
            return torch.empty(nbytes, dtype=torch.uint8, device=self.where)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{self.name} has {format_bytes(self.free_bytes())} free, and "
                f"{format_bytes(nbytes)} were wanted: other programs use it; lower --gpu-memory"
            ) from error

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """See Device."""
        with torch.cuda.device(self.where), torch.cuda.stream(self._compute):
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
        with torch.cuda.stream(self._copies):
            for mark in after:
                assert isinstance(mark, _CudaEvent)
                self._copies.wait_event(mark.event)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            self._copies.record_event(begin)
            for target, source in joined(targets, sources):
                target.copy_(source, non_blocking=True)
            self._copies.record_event(end)
            return _CudaCopyEvent(begin, end)

    def record_event(self) -> Event:
        """See Device."""
        return _CudaEvent(self._compute.record_event())

    def wait_event(self, mark: Event) -> None:
        """See Device."""
        assert isinstance(mark, _CudaEvent)
        self._compute.wait_event(mark.event)

    def write_back(self, work: Callable[[], None]) -> Event:
        """See Device."""
        computed = self._compute.record_event()
        with torch.cuda.stream(self._writes):
            self._writes.wait_event(computed)
            work()
            return _CudaEvent(self._writes.record_event())

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        """See Device."""
        graph = torch.cuda.CUDAGraph()
        self._compute.synchronize()
        # One pool for all graphs: they never run at the same time.
        try:
            with torch.cuda.graph(graph, pool=self._graphs, stream=self._compute):
                result = compute()
        except BaseException:
            self._abandon(graph)
            raise
        return CapturedStep((GraphSegment(SegmentKind.DEVICE_GRAPH, graph.replay),), result)

    def capture_segments(self, compute: Callable[[SegmentRecorder], torch.Tensor]) -> CapturedStep:
        """See Device."""
        # One pool for all: what one graph leaves for the next stays where it is meanwhile.
        recorder = _CudaRecorder(self._graphs)
        self._compute.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._compute):
            try:
                recorder.begin()
                result = compute(recorder)
                recorder.end()
            except BaseException:
                self._abandon(recorder.graph)
                raise
        return CapturedStep(tuple(recorder.segments), result)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which something failed.

        It cannot end well: torch stops at the driver's error, before it stops to allocate from the
        pool of graphs, and the pool then takes no other capture.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.where.index or 0, self._graphs)
        self._graphs = torch.cuda.graph_pool_handle()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """See Device."""
        self._copies.synchronize()
        self._writes.synchronize()
        self._compute.synchronize()

    def pin(self, memory: torch.Tensor) -> bool:
        """See Device."""
        runtime = torch.cuda.cudart()
        done = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_MAPPED)
        if int(done) != 0:
            runtime.cudaGetLastError()  # or the next call would report it
            return False
        return True

    def address(self, memory: torch.Tensor) -> int:
        """See Device.  Raises MachineError where the driver does not know the memory."""
        found = ctypes.c_uint64()
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(memory.data_ptr()), 0
        )
        if status != 0:
            raise MachineError(f"{self.name} cannot read host memory where it is (error {status})")
        return found.value

    def unpin(self, memory: torch.Tensor) -> None:
        """See Device."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def close(self) -> None:
        """See Device."""
        self.synchronize()
        self.empty_cache()

    def _context_bytes(self) -> int:
        """What the driver took for this process before anything was allocated."""
        return torch.cuda.get_device_properties(self.where).total_memory - max(
            self._free_at_start, torch.cuda.mem_get_info(self.where)[0]
        )
