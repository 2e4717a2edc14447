"""How much memory this process may use, and how much it has used, as the kernel counts it."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

# Options of mallopt(3), as malloc.h numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LEAST_THRESHOLD = 128 << 10  # glibc begins with it
_MOST_MMAP_THRESHOLD = 32 << 20  # and refuses more

_kept_bytes = 0  # of `keep_freed_activations`


def available_host_bytes() -> int:
    """Memory that can still be taken: the system's available RAM, less where a cgroup limits us."""
    free = int(psutil.virtual_memory().available)
    limit = cgroup_limit_bytes()
    if limit is not None:
        free = min(free, max(0, limit - resident_bytes()))
    return free


def physical_host_bytes() -> int:
    """Memory that this process could ever have: the system's RAM, or our cgroup's limit."""
    total = int(psutil.virtual_memory().total)
    limit = cgroup_limit_bytes()
    return total if limit is None else min(total, limit)


def cgroup_limit_bytes() -> int | None:
    """The hard memory limit of our cgroup (v2 or v1), or None where there is none."""
    limits = [
        int(text)
        for path in _limit_files()
        if path.is_file() and (text := path.read_text().strip()).isdigit()
    ]
    # v1 says "no limit" with a number near 2**63.
    real = [limit for limit in limits if limit < 1 << 60]
    return min(real, default=None)


def trim_heap() -> None:
    """Give the system what the allocator has kept of freed memory, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def limit_malloc_arenas() -> None:
    """Let this process's threads share two arenas of glibc's allocator; before they are started.

    There are up to eight for each core otherwise, and each keeps what was freed in it: a process
    that answered grew by 22 MiB while models came and went 225 times, and by nothing with one.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)


def keep_freed_activations(nbytes: int) -> None:
    """Let the heap keep up to `nbytes` that were freed, and take activations from it.

    glibc returns large tensors to the kernel as soon as they are freed, and the kernel clears every
    page that is touched anew.  Where 16 threads write one matrix, each of them faults on most of
    its pages: a prompt of 512 tokens of a 1.1B model took 370,000 faults and 600 ms; with memory
    that stays, 2,500 faults and 300 ms.

    For the whole process, which keeps the most that was asked for.
    """
    global _kept_bytes
    if nbytes <= _kept_bytes:
        return
    _kept_bytes = nbytes
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        # Setting either ends glibc's own adjustment of both.
        libc.mallopt(_MMAP_THRESHOLD, min(max(nbytes, _LEAST_THRESHOLD), _MOST_MMAP_THRESHOLD))
        libc.mallopt(_TRIM_THRESHOLD, min(max(nbytes, _LEAST_THRESHOLD), (1 << 31) - 1))


def resident_bytes() -> int:
    """This process's resident memory now (VmRSS)."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """This process's largest resident memory so far (VmHWM), or since `reset_peak_resident`."""
    return _status_bytes("VmHWM")


def reset_peak_resident() -> None:
    """Let the largest resident memory be that of now, where the kernel can; see proc(5)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _limit_files() -> list[Path]:
    files = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    membership = Path("/proc/self/cgroup")
    if not membership.is_file():
        return files
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        inner = Path(group.lstrip("/"))
        for level in (inner, *inner.parents):  # a limit holds for everything below it
            if controllers == "":
                files.append(Path("/sys/fs/cgroup") / level / "memory.max")
            elif "memory" in controllers.split(","):
                files.append(Path("/sys/fs/cgroup/memory") / level / "memory.limit_in_bytes")
    return files


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux: the current size stands for the peak too
        return int(psutil.Process().memory_info().rss)
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
