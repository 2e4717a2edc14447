"""What the link to a device gives, alone and while the CPU reads the same memory."""

import time
from collections.abc import Callable

import torch

from hmt.memory.device.interface import Device, Event

_UNDER_WAY = 4  # copies: the link never waits for the next one


class Link:
    """Copies of `source`, in pinned host memory, to `target`; some of them always under way."""

    def __init__(self, device: Device, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device, self._target, self._source = device, target, source
        self._under_way: list[Event] = []
        self.copied_bytes = 0

    def keep_busy(self) -> None:
        """Count what has arrived, and begin as much anew."""
        while self._under_way and self._under_way[0].reached():
            self._under_way.pop(0)
            self.copied_bytes += self._source.nbytes
        while len(self._under_way) < _UNDER_WAY:
            self._under_way.append(self._device.copy(self._target, self._source))

    def wait(self) -> None:
        """Let the first copy that is under way arrive."""
        self._under_way[0].wait()

    def settle(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._under_way.pop().wait()


def link_rate(link: Link, seconds: float) -> float:
    """Bytes per second of the link while the CPU does nothing."""
    return rates_at_once(link, None, seconds)[0]


def rates_at_once(
    link: Link, read: Callable[[], int] | None, seconds: float
) -> tuple[float, float]:
    """Bytes per second of the link, and of `read`, which reads memory and returns how much."""
    link.keep_busy()
    for _ in range(4):  # wakes the CPU's threads
        if read is not None:
            read()
    link.wait()
    link.keep_busy()
    link.copied_bytes = read_bytes = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        if read is None:
            link.wait()
        else:
            read_bytes += read()
        link.keep_busy()
    took = time.perf_counter() - begin
    rates = link.copied_bytes / took, read_bytes / took
    link.settle()
    return rates
