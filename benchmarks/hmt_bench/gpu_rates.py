"""What a machine with a GPU could do at best: its memories and the link, alone and at once.

The CPU and the link read the same memory, so what both give together is less than the sum of what
each gives alone, and it is that which a model larger than the GPU is measured against.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hmt.base.errors import ConfigError, MachineError
from hmt.base.units import GIB, MIB
from hmt.bench.ceilings import computing_with
from hmt.bench.competitors import copy_of_weight, formats, random_weight
from hmt.bench.gpu_kernels import device_read_rate
from hmt.contracts.encoding import Activations
from hmt.formats.gguf import FILE_TYPES
from hmt.hardware.link_rates import Products
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import HostBuffer, cache_bytes
from hmt.memory.device import Device, Link, link_rate, rates_at_once
from hmt.quant import Format
from hmt.quant.repacking import gguf_format

_COPY_BYTES = 256 * MIB
_ROUNDS = 3
_ROUND_S = 0.3
_ROWS, _COLUMNS = 28672, 8192  # of the same FFN
_LEAST_WEIGHTS_BYTES = GIB
_MOST_WEIGHTS_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, the best of some rounds.

    device    the GPU reading its own memory
    link, cpu   from pinned memory to the GPU; the CPU computing with packed weights, one token at a
              time; each alone
    shared_link, shared_cpu   both at once
    encoding  of those weights
    """

    device: float
    link: float
    cpu: float
    shared_link: float
    shared_cpu: float
    encoding: str


def measure_rates(device: Device, encoding: str) -> Rates:
    """Measure a CUDA `device` and this CPU with weights of `encoding` (3 s, 5 GB).

    encoding   also one of FILE_TYPES: the type of most of its weights

    Raises ConfigError for an encoding without packed weights, MachineError for another device.
    """
    form = _format(encoding)
    if device.where.type != "cuda":
        raise MachineError(f"{device.name} has no rates: give the number of a GPU (--gpu-id)")
    host = HostBuffer(_COPY_BYTES)
    host.tensor.random_(0, 256)
    target = device.allocate(_COPY_BYTES)
    pinned = device.pin(host.tensor)
    try:
        with computing_with(usable_threads()):
            link, read = Link(device, target, host.tensor), _products(form).compute
            alone = [(link_rate(link, _ROUND_S), _alone(read)) for _ in range(_ROUNDS)]
            both = [rates_at_once(link, read, _ROUND_S) for _ in range(_ROUNDS)]
    finally:
        device.synchronize()
        if pinned:
            device.unpin(host.tensor)
    at_once = max(both, key=sum)
    return Rates(
        device=device_read_rate(),
        link=max(rate for rate, _ in alone),
        cpu=max(rate for _, rate in alone),
        shared_link=at_once[0],
        shared_cpu=at_once[1],
        encoding=encoding,
    )


def _format(encoding: str) -> Format:
    if encoding in FILE_TYPES:
        return gguf_format(FILE_TYPES[encoding].base).with_activations(Activations.INT8_TOKEN)
    if encoding not in formats():
        known = ", ".join([*formats(), *FILE_TYPES])
        raise ConfigError(f"no rates of {encoding}: choose one of {known}")
    return formats()[encoding]


def _products(form: Format) -> Products:
    wanted = min(max(_LEAST_WEIGHTS_BYTES, 4 * cache_bytes()), _MOST_WEIGHTS_BYTES)
    first = random_weight(form, (_ROWS, _COLUMNS))
    return Products([first, *(copy_of_weight(first) for _ in range(wanted // first.nbytes))])


def _alone(read: Callable[[], int]) -> float:
    begin, nbytes = time.perf_counter(), 0
    while (took := time.perf_counter() - begin) < _ROUND_S:
        nbytes += read()
    return nbytes / took
