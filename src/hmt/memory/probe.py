"""Measuring what the drive and the memory of this machine give."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hmt.base.trace import Tracer
from hmt.base.units import KIB, MIB, round_down
from hmt.memory.arena import PAGE_BYTES, HostBuffer
from hmt.memory.readers import open_reader
from hmt.memory.transfer import DiskRead, TransferQueue

SWEEP_BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
SWEEP_THREADS = (1, 2, 4, 8, 16)
QUICK_BLOCK_BYTES, QUICK_THREADS = 2 * MIB, 8

_LEAST_FILE_BYTES = 64 * MIB  # a smaller file sits in caches of the drive and of the hypervisor
_FIRST_ROUND_BYTES = 16 * MIB
_HUGE_BUFFER_BYTES = 16 * MIB
_CACHES = Path("/sys/devices/system/cpu")
_ASSUMED_CACHE_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What a drive gave: `rate` bytes per second, reading `threads` blocks at a time."""

    block_bytes: int
    threads: int
    rate: float


def disk_rate(file: Path, block_bytes: int, threads: int, seconds: float) -> DiskRate:
    """Read `file` with O_DIRECT for about `seconds`, from its start and round again.

    The file must hold at least one block.  Raises DiskReadError.
    """
    blocks = file.stat().st_size // block_bytes
    assert blocks > 0, f"{file} is shorter than a block of {block_bytes} bytes"
    # Reads go round in one buffer: what arrives is of no interest.  It is large enough for huge
    # pages, without which the same drive gave a third (1.0 instead of 3.0 GB/s).
    buffer = HostBuffer(max(threads * block_bytes, _HUGE_BUFFER_BYTES))
    buffer.tensor.fill_(0)  # page faults belong to nobody's rate
    places = [buffer.view[i * block_bytes :][:block_bytes] for i in range(threads)]
    queue = TransferQueue(
        open_reader("direct"), Tracer(capacity=0), threads=threads, chunk_bytes=block_bytes
    )
    try:
        count, position = -(-_FIRST_ROUND_BYTES // block_bytes), 0
        while True:
            offsets = [(position + i) % blocks * block_bytes for i in range(count)]
            reads = [
                DiskRead(file, offset, places[i % threads], offset + block_bytes)
                for i, offset in enumerate(offsets)
            ]
            elapsed = _read_all(queue, reads)
            # Rounds double, so the last one takes at least a quarter of the time.
            if elapsed >= seconds / 4:
                return DiskRate(block_bytes, threads, count * block_bytes / elapsed)
            position, count = position + count, 2 * count
    finally:
        queue.close()


def sweep(
    file: Path, seconds: float, progress: Callable[[DiskRate], None] | None = None
) -> DiskRate:
    """The best of all block sizes and thread counts, each measured for about `seconds`.

    `progress` is told each result.  Raises DiskReadError.
    """
    results = []
    for block_bytes in SWEEP_BLOCKS:
        for threads in SWEEP_THREADS:
            results.append(disk_rate(file, block_bytes, threads, seconds))
            if progress is not None:
                progress(results[-1])
    return max(results, key=lambda result: result.rate)


@contextmanager
def file_to_read(path: Path) -> Iterator[Path | None]:
    """A file on the drive of `path` that is large enough to measure the drive with.

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


def _read_all(queue: TransferQueue, reads: list[DiskRead]) -> float:
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
    """Write random bytes to the drive itself; False when it refuses."""
    random = os.urandom(MIB)
    try:
        for _ in range(_LEAST_FILE_BYTES // len(random)):
            os.write(descriptor, random)
        os.fsync(descriptor)
    except OSError:
        return False
    return True
