"""What a machine with a GPU could do at best: its memories and the link, alone and at once.

The CPU and the link read the same memory, so what both give together is less than the sum of what
each gives alone, and it is that which a model larger than the GPU is measured against.
"""

import time
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import torch

from hmt.base.errors import ConfigError, MachineError
from hmt.base.units import GIB, MIB
from hmt.bench.ceilings import computing_with
from hmt.bench.contenders import copy_of_weight, formats, random_weight
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import HostBuffer, cache_bytes
from hmt.memory.device import Device, Mark

_DEVICE_BYTES = 4 * GIB
_COPY_BYTES = 256 * MIB
_COPIES_AHEAD = 4
_ROUNDS = 3
_ROUND_S = 0.3
_ROWS, _COLUMNS = 28672, 8192  # of the same FFN
_LEAST_WEIGHTS_BYTES = GIB
_MOST_WEIGHTS_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second.

    device                    the GPU reading its own memory
    link, cpu                 from pinned memory to the GPU; the CPU computing with packed weights,
                              one token at a time; each alone
    shared_link, shared_cpu   both at once
    encoding                  of those weights
    """

    device: float
    link: float
    cpu: float
    shared_link: float
    shared_cpu: float
    encoding: str


def measure_rates(device: Device, encoding: str) -> Rates:
    """Measure a CUDA `device` and this CPU with weights of `encoding` (3 s, 5 GB).

    Raises ConfigError for an encoding without packed weights, MachineError for another device.
    """
    if encoding not in formats():
        raise ConfigError(f"no rates of {encoding}: choose one of {', '.join(formats())}")
    if device.where.type != "cuda":
        raise MachineError(f"{device.name} has no rates: give the number of a GPU (--gpu-id)")
    host = HostBuffer(_COPY_BYTES)
    host.tensor.random_(0, 256)
    target = device.allocate(_COPY_BYTES)
    pinned = device.pin(host.tensor)
    try:
        with computing_with(usable_threads()):
            link, cpu = _Link(device, target, host.tensor), _Products(encoding)
            alone = [(_run(link, None)[0], _run(None, cpu)[1]) for _ in range(_ROUNDS)]
            both = [_run(link, cpu) for _ in range(_ROUNDS)]
    finally:
        device.synchronize()
        if pinned:
            device.unpin(host.tensor)
    return Rates(
        device=device_read_rate(),
        link=median(rate for rate, _ in alone),
        cpu=median(rate for _, rate in alone),
        shared_link=median(rate for rate, _ in both),
        shared_cpu=median(rate for _, rate in both),
        encoding=encoding,
    )


def device_read_rate() -> float:
    """Bytes per second at which the GPU reads its memory, at its best."""
    memory = torch.ones(_DEVICE_BYTES // 2, dtype=torch.bfloat16, device="cuda").view(-1, 8192)
    vector = torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    rates = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        torch.mv(memory, vector)
        end.record()
        end.synchronize()
        rates.append(memory.nbytes / (begin.elapsed_time(end) * 1e-3))
    del memory
    torch.cuda.empty_cache()
    return max(rates)


class _Link:
    """Copies to the device, some of them always under way."""

    def __init__(self, device: Device, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device, self._target, self._source = device, target, source
        self._under_way: list[Mark] = []
        self.copied_bytes = 0

    def keep_busy(self) -> None:
        """Count what has arrived, and begin as much anew."""
        while self._under_way and self._under_way[0].reached():
            self._under_way.pop(0)
            self.copied_bytes += self._source.nbytes
        while len(self._under_way) < _COPIES_AHEAD:
            self._under_way.append(self._device.copy(self._target, self._source))

    def wait(self) -> None:
        """Let the first copy arrive."""
        self._under_way[0].wait()

    def settle(self) -> None:
        """Wait for all copies, and count from zero."""
        while self._under_way:
            self._under_way.pop().wait()
        self.copied_bytes = 0


class _Products:
    """Products of one token with weights that no cache holds together."""

    def __init__(self, encoding: str) -> None:
        form = formats()[encoding]
        wanted = min(max(_LEAST_WEIGHTS_BYTES, 4 * cache_bytes()), _MOST_WEIGHTS_BYTES)
        first = random_weight(form, (_ROWS, _COLUMNS))
        copies = [copy_of_weight(first) for _ in range(wanted // first.nbytes)]
        self._weights = cycle([first, *copies])
        self._x = torch.randn(1, _COLUMNS).bfloat16()
        self.read_bytes = 0

    def compute(self) -> None:
        """One product."""
        weight = next(self._weights)
        ops.linear(self._x, weight)
        self.read_bytes += weight.nbytes


def _run(link: _Link | None, cpu: _Products | None) -> tuple[float, float]:
    """Rates of the link and of the CPU, at once where both are given."""
    if link is not None:
        link.keep_busy()
    if cpu is not None:
        for _ in range(8):  # wakes the threads
            cpu.compute()
        cpu.read_bytes = 0
    if link is not None:
        link.wait()
        link.keep_busy()
        link.copied_bytes = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < _ROUND_S:
        if cpu is not None:
            cpu.compute()
        elif link is not None:
            link.wait()
        if link is not None:
            link.keep_busy()
    seconds = time.perf_counter() - begin
    rates = (
        0.0 if link is None else link.copied_bytes / seconds,
        0.0 if cpu is None else cpu.read_bytes / seconds,
    )
    if link is not None:
        link.settle()
    return rates
