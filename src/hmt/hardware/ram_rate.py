"""The rate at which this machine's cores read its memory."""

from collections.abc import Callable

import torch

from hmt.base.units import GIB, MIB, round_down
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, available_host_bytes, cache_bytes, ram_read_rate

QUICK_S, FULL_S = 0.1, 0.5  # per rate
_QUICK_BUFFER_BYTES = 256 * MIB
_FULL_BUFFER_BYTES = GIB


def measured_ram(*, quick: bool) -> float:
    """The rate at which all cores together read memory that no cache holds; 0 when unknown."""
    # Caches keep a part of what is read again and again: with a buffer of four times their size
    # the rate came out 10 to 30% too high, with eight times it agreed with much larger ones.
    caches, available = cache_bytes(), available_host_bytes()
    if quick:
        # Twice the caches at least: some servers have more cache than a quick buffer is large.
        most = min(4 * caches, max(_QUICK_BUFFER_BYTES, 2 * caches), available // 8)
    else:
        most = min(8 * caches, max(_FULL_BUFFER_BYTES, 4 * caches), available // 4)
    if most < caches:
        return 0.0  # the rate of the cache would be all that shows
    read, restore = reader()
    try:
        return ram_read_rate(read, round_down(most, PAGE_BYTES), QUICK_S if quick else FULL_S)
    except OSError:
        return 0.0
    finally:
        restore()


def reader() -> tuple[Callable[[torch.Tensor], object], Callable[[], None]]:
    """A function that reads a uint8 tensor with all cores, and one that restores the threads."""
    native = extension.load()
    if native is not None:
        before = native.threads()
        native.set_threads(usable_threads())
        return (
            lambda memory: native.sum_words(memory.data_ptr(), memory.nbytes // 8),
            lambda: native.set_threads(before),
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_threads())
    return (
        lambda memory: memory.view(torch.int64).sum(),
        lambda: torch.set_num_threads(threads),
    )
