"""Measuring what the disk and the memory of this machine give."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hmt.base.errors import MachineError
from hmt.base.trace import Tracer
from hmt.base.units import KIB, MIB, round_down, round_up
from hmt.memory.allocator.arena import PAGE_BYTES, HostBuffer
from hmt.memory.disk import uring
from hmt.memory.disk.read_queue import ReadQueue
from hmt.memory.disk.read_scheduler import DiskRead
from hmt.memory.disk.reader_kinds import open_reader
from hmt.memory.process_memory import available_host_bytes

SWEEP_BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
SWEEP_DEPTHS = (1, 2, 4, 8, 16)
QUICK_BLOCK_BYTES, QUICK_DEPTH = 2 * MIB, 8

_AS_GOOD = 0.94  # of the best rate: what differs by less is chance
# A disk with less than this in flight falls idle when a computation keeps the cores.  Decoding
# from a disk of 2.6 to 3.0 GB/s, 4 MiB in flight gave 79% of its rate, 8 MiB 93%, 16 MiB 93%, and
# 32 MiB 97%.  Beside idle cores all of them are alike; sweeps of 0.2 s per setting found 4, 8 or
# 16 MiB the fastest in different runs; so settings with enough in flight come first unless clearly
# slower.
_ENOUGH_S = 6e-3
_CLEARLY_SLOWER = 0.85
_WORTH_REPEATING = 0.9
_MOST_REPEATED = 8

_LEAST_FILE_BYTES = 64 * MIB  # a smaller file sits in caches of the disk and of the hypervisor
_FIRST_ROUND_BYTES = 16 * MIB
_ROUND = 16  # times what is in flight
# What is read into memory that caches hold is not what a model's blocks are: into 16 MiB the same
# virtual disk gave 3.7 GB/s, into 64 MiB and more 2.6.  Large buffers are on huge pages, too,
# without which the disk gave a third.
_BUFFER_BYTES = 64 * MIB
_CACHES = Path("/sys/devices/system/cpu")
_ASSUMED_CACHE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What a disk gave: `rate` bytes per second, reading `depth` blocks at a time.

    reader   one of READERS
    """

    reader: str
    block_bytes: int
    depth: int
    rate: float

    @property
    def in_flight_bytes(self) -> int:
        """What an urgent read may have to wait for."""
        return self.block_bytes * self.depth


Progress = Callable[[DiskRate], None]


def usable_readers() -> list[str]:
    """Readers past the page cache that this machine has, the one that costs less CPU time first.

    The others keep a second copy of all weights in memory that is not theirs, so they are used
    only where somebody asks for them.
    """
    return ["io_uring", "direct"] if uring.unavailable() is None else ["direct"]


def usual_rate() -> DiskRate:
    """How to read a disk that was not measured; its rate is 0."""
    return DiskRate(usable_readers()[0], QUICK_BLOCK_BYTES, QUICK_DEPTH, 0.0)


def disk_rate(
    file: Path,
    reader: str,
    block_bytes: int,
    depth: int,
    seconds: float,
    buffer: HostBuffer | None = None,
) -> DiskRate:
    """Read `file` for about `seconds`, from its start and round again.

    The file must hold at least one block.  `buffer`: where to, `disk_buffer` if None; changed.
    Raises DiskReadError, MachineError for a shorter file.
    """
    nbytes = file.stat().st_size
    blocks = nbytes // block_bytes
    if not blocks:
        raise MachineError(
            f"{file} has {nbytes} bytes; reading blocks of {block_bytes} cannot be measured with "
            "it: name a larger file"
        )
    if buffer is None or buffer.nbytes < depth * block_bytes:
        buffer = disk_buffer(depth * block_bytes)
    # Reads go round in one buffer: what arrives is of no interest.
    count = buffer.nbytes // block_bytes
    places = [buffer.view[i * block_bytes :][:block_bytes] for i in range(count)]
    queue = ReadQueue(open_reader(reader), Tracer(capacity=0), depth=depth, chunk_bytes=block_bytes)
    try:
        count, position = -(-_FIRST_ROUND_BYTES // block_bytes), 0
        while True:
            offsets = [(position + i) % blocks * block_bytes for i in range(count)]
            reads = [
                DiskRead(file, offset, places[(position + i) % len(places)], offset + block_bytes)
                for i, offset in enumerate(offsets)
            ]
            elapsed = _read_all(queue, reads)
            # Rounds double, so the last one takes at least a quarter of the time.  It is so long
            # that its end, when less and less is in flight, is a small part: rounds of 50 ms showed
            # 32 MiB in flight 15% slower than 4 MiB.
            if elapsed >= seconds / 4 and count >= _ROUND * depth:
                return DiskRate(reader, block_bytes, depth, count * block_bytes / elapsed)
            position, count = position + count, 2 * count
    finally:
        queue.close()


def disk_buffer(least_bytes: int = 0) -> HostBuffer:
    """Where reads go that are timed; 64 MiB, less where memory is short."""
    size = max(least_bytes, min(_BUFFER_BYTES, available_host_bytes() // 8), PAGE_BYTES)
    buffer = HostBuffer(round_up(size, PAGE_BYTES))
    buffer.tensor.fill_(0)  # page faults belong to nobody's rate
    return buffer


def quick_rate(file: Path, seconds: float, progress: Progress | None = None) -> DiskRate:
    """The better reader at one usual block size and depth.  Raises DiskReadError."""
    results, buffer = [], disk_buffer()
    for reader in usable_readers():
        results.append(disk_rate(file, reader, QUICK_BLOCK_BYTES, QUICK_DEPTH, seconds, buffer))
        if progress is not None:
            progress(results[-1])
    return best_of(results)


def sweep(file: Path, seconds: float, progress: Progress | None = None) -> DiskRate:
    """The best of all readers, block sizes and depths, each measured for about `seconds`.

    The few that are near the best are measured twice, and count with their mean.  `progress` is
    told each result.  Raises DiskReadError.
    """
    buffer = disk_buffer()

    def measured(reader: str, block_bytes: int, depth: int) -> DiskRate:
        result = disk_rate(file, reader, block_bytes, depth, seconds, buffer)
        if progress is not None:
            progress(result)
        return result

    results = [
        measured(reader, block_bytes, depth)
        for reader in usable_readers()
        for block_bytes in SWEEP_BLOCKS
        for depth in SWEEP_DEPTHS
    ]
    fastest = max(result.rate for result in results)
    near = [result for result in results if result.rate >= _WORTH_REPEATING * fastest]
    near.sort(key=lambda result: _cost(result, fastest))
    again = []
    for one in dict.fromkeys([best_of(results), *near[:_MOST_REPEATED]]):
        second = measured(one.reader, one.block_bytes, one.depth)
        again.append(replace(one, rate=(one.rate + second.rate) / 2))
    return best_of(again)


def best_of(results: Sequence[DiskRate]) -> DiskRate:
    """Of those that are as good as the fastest, the one that costs others least.

    Enough has to be in flight for a disk to be busy while all cores compute.  Beyond that, the
    reader that takes less of their time, and then what an urgent read waits for: the least in
    flight.
    """
    fastest = max(result.rate for result in results)
    enough = [
        result
        for result in results
        if result.rate >= _CLEARLY_SLOWER * fastest and not _lacking(result, fastest)
    ]
    best = max(result.rate for result in enough or results)
    good = [result for result in enough or results if result.rate >= _AS_GOOD * best]
    return min(good, key=lambda result: _cost(result, fastest))


def _lacking(result: DiskRate, rate: float) -> float:
    """Bytes that are missing in flight to keep a disk of `rate` busy beside a computation."""
    return max(0.0, _ENOUGH_S * rate - result.in_flight_bytes)


def _cost(result: DiskRate, rate: float) -> tuple[float, bool, int]:
    """Orders ways to read that are equally fast, the best one first."""
    return _lacking(result, rate), result.reader != "io_uring", result.in_flight_bytes


@contextmanager
def file_to_read(path: Path) -> Iterator[Path | None]:
    """A file on the disk of `path` that is large enough to measure the disk with.

    `path` itself, the largest file of that folder, or a temporary file of random bytes beside
    them; None where there is none and none can be written.
    """
    folder = path if path.is_dir() else path.parent
    largest = max(_sized([path] if path.is_file() else list(folder.iterdir())), default=None)
    if largest is not None and largest[0] >= _LEAST_FILE_BYTES:
        yield largest[1]
        return
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".hmt-probe-")
    except OSError:
        yield None
        return
    try:
        yield Path(name) if _fill(descriptor) else None
    finally:
        os.close(descriptor)
        os.unlink(name)


def ram_read_rate(
    read: Callable[[torch.Tensor], object], buffer_bytes: int, seconds: float
) -> float:
    """Bytes per second at which `read(memory)` goes over a uint8 tensor, at its best.

    `read` returns when it has read every byte.  A buffer of `buffer_bytes` is allocated and given
    back.  OSError where there is no memory for it.
    """
    buffer = HostBuffer(buffer_bytes)
    buffer.tensor.fill_(1)
    end, best_s = time.perf_counter() + seconds, math.inf
    while best_s == math.inf or time.perf_counter() < end:
        begin = time.perf_counter()
        read(buffer.tensor)
        best_s = min(best_s, time.perf_counter() - begin)
    buffer.discard()
    return buffer.nbytes / best_s


def cache_bytes() -> int:
    """The last-level caches of all CPUs together, as the kernel tells; 32 MiB where it does not."""
    sizes: dict[str, int] = {}
    for cache in _CACHES.glob("cpu[0-9]*/cache/index3"):
        try:
            size = (cache / "size").read_text().strip()
            sizes[(cache / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * KIB
        except (OSError, ValueError):
            continue
    return sum(sizes.values()) or _ASSUMED_CACHE_BYTES


def _read_all(queue: ReadQueue, reads: list[DiskRead]) -> float:
    """Seconds until all `reads` have arrived."""
    begin = time.perf_counter()
    queue.read(reads)
    return time.perf_counter() - begin


def _sized(files: list[Path]) -> list[tuple[int, Path]]:
    """Readable regular files with their sizes, whole pages only."""
    return [
        (round_down(file.stat().st_size, PAGE_BYTES), file)
        for file in files
        if file.is_file() and os.access(file, os.R_OK)
    ]


def _fill(descriptor: int) -> bool:
    """Write random bytes to the disk itself; False when it refuses."""
    random = os.urandom(MIB)
    try:
        for _ in range(_LEAST_FILE_BYTES // len(random)):
            os.write(descriptor, random)
        os.fsync(descriptor)
    except OSError:
        return False
    return True
