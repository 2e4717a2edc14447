"""How many threads compute: one number for the extension's pool and for torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hmt.kernels.cpu import extension

# A device's part of a layer takes tenths of a millisecond; to wake workers that slept meanwhile
# takes up to one more.
_WATCH_MICROSECONDS = 5000


def usable_threads() -> int:
    """Threads that can compute at once for the calling thread, as csrc/base/topology.h counts them.

    Physical cores of its affinity mask, or the whole CPUs of its cgroup's quota where those are
    fewer; without the extension, all CPUs of the mask.
    """
    native = extension.load()
    if native is not None:
        return int(native.Topology().threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None) -> int:
    """Let `threads` compute, the caller's included, here and in threads started later; returns it.

    None keeps torch's setting, which OMP_NUM_THREADS or the program may have made, up to
    `usable_threads`.  The pool reads anew which CPUs the calling thread may use.
    """
    wanted = min(torch.get_num_threads(), usable_threads()) if threads is None else threads
    torch.set_num_threads(wanted)
    native = extension.load()
    if native is not None:
        native.set_threads(wanted)
    return wanted


@contextmanager
def awake_workers() -> Iterator[None]:
    """In the body, workers of the extension's pool stay awake between calls, for milliseconds.

    For a step in which a device has its part between two of the CPU's.
    """
    native = extension.load()
    if native is None:
        yield
        return
    native.watch_for(_WATCH_MICROSECONDS)
    try:
        yield
    finally:
        native.watch_for(0)
