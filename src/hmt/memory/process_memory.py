"""How much memory this process may use, and how much it has used, as the kernel counts it."""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


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
