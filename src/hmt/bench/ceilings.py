"""What this machine could do at best: the rates that kernels are measured against."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from hmt.base.units import round_down
from hmt.kernels.cpu import extension
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes

_CACHES = 8  # in a buffer so many times the caches' size they no longer show
_LEAST_BYTES = 1 << 28


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """torch and the compiled kernels on so many threads, and on as many as before afterwards."""
    native = extension.load()
    before = torch.get_num_threads(), native.threads() if native else 0
    torch.set_num_threads(threads)
    if native is not None and before[1] != threads:
        native.set_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        if native is not None and before[1] != threads:
            native.set_threads(before[1])


class ReadRate:
    """The rate of reading memory, measured again and again beside something else.

    On the threads of `computing_with`.
    """

    def __init__(self, least_bytes: int = _LEAST_BYTES) -> None:
        """Takes a buffer of `least_bytes`, or of several times the caches, until it is deleted."""
        wanted = max(least_bytes, _CACHES * cache_bytes())
        size = round_down(min(wanted, available_host_bytes() // 4), PAGE_BYTES)
        # On huge pages, as weights are: small ones read 4 to 8% slower.
        self._memory = HostBuffer(size).tensor.fill_(1)
        self._native = extension.load()
        self._rates: list[float] = []
        self._read()  # threads start, pages are there

    def sample(self) -> None:
        """Measure once more: the faster of two, since the threads may have been asleep."""
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            self._read()
            seconds.append(time.perf_counter() - begin)
        self._rates.append(self._memory.nbytes / min(seconds))

    @property
    def rate(self) -> float:
        """Bytes per second: the median of all samples."""
        return median(self._rates)

    def _read(self) -> None:
        if self._native is None:
            self._memory.view(torch.int64).sum()
        else:
            self._native.sum_words(self._memory.data_ptr(), self._memory.nbytes // 8)


class Peaks:
    """Operations per second on registers, measured again and again beside something else.

    A product and a sum count as two.
    """

    KINDS = ("int8", "bf16", "f32")
    _SAMPLE_S = 0.01

    def __init__(self, threads: int) -> None:
        """Nothing is measured without the compiled kernels."""
        self._native, self._threads = extension.load(), threads
        self._samples: dict[str, list[float]] = {kind: [] for kind in self.KINDS}

    def sample(self) -> None:
        """Measure each kind once more."""
        if self._native is None:
            return
        for kind, samples in self._samples.items():
            samples.append(self._native.peak_ops(kind, self._threads, self._SAMPLE_S))

    @property
    def rates(self) -> dict[str, float]:
        """The median of all samples by kind; those that were measured."""
        return {kind: median(samples) for kind, samples in self._samples.items() if samples}
