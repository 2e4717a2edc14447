"""What the link to a GPU gives, and what link and CPU give at once; measured once per process.

Both read host memory, so together they give less than each alone.  And the CPU does not compute
with every format as fast as it reads: of int4 with float activations it takes a third.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from hmt.base.units import MIB, round_down, round_up
from hmt.contracts.encoding import WeightTensor
from hmt.hardware.gemm_rates import weights_in
from hmt.kernels import ops
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.memory.device import Device, Link, link_rate, rates_at_once
from hmt.quant import Format, component_bytes

_COPY_BYTES = 256 * MIB
_SECONDS = 0.1  # per rate
_SHAPE = (8192, 8192)
_ALIGNMENT = 64
_NUMBERS = 0x38  # each byte: small positive numbers in every float format


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second.

    link                      from pinned host memory to the device, alone
    shared_link, shared_cpu   at once, the CPU multiplying one token with weights; 0: not measured
    """

    link: float
    shared_link: float = 0.0
    shared_cpu: float = 0.0


def link_rates(device: Device, form: Format | None) -> LinkRates:
    """Rates of `device` and of the CPU with weights of `form`; half a second when they are new."""
    key = device.name, form
    if key not in _known:
        _known[key] = _measure(device, form)
        device.empty_cache()  # or torch keeps the buffer, and what is loaded next does not fit
    return _known[key]


_known: dict[tuple[str, Format | None], LinkRates] = {}


def _measure(device: Device, form: Format | None) -> LinkRates:
    size = round_down(min(_COPY_BYTES, available_host_bytes() // 8), PAGE_BYTES)
    host = HostBuffer(size)
    host.tensor.fill_(_NUMBERS)
    pinned = device.pin(host.tensor)
    try:
        with device.compute_stream(), torch.inference_mode():
            link = Link(device, device.allocate(size), host.tensor)
            alone = link_rate(link, _SECONDS)
            if form is None:
                return LinkRates(alone)
            each = sum(component_bytes(form, _SHAPE)) + len(form.components(_SHAPE)) * _ALIGNMENT
            own = HostBuffer(round_up(max(size, 2 * cache_bytes(), each), PAGE_BYTES))
            own.tensor.fill_(_NUMBERS)
            products = Products(weights_in(own.tensor, form, _SHAPE))
            both = rates_at_once(link, products.compute, _SECONDS)
            del products
            own.discard()
            return LinkRates(alone, *both)
    finally:
        if pinned:
            device.unpin(host.tensor)
        host.discard()


class Products:
    """Products of one token with weights of one shape, which no cache should hold together."""

    def __init__(self, weights: Sequence[WeightTensor]) -> None:
        self._weights = cycle(weights)
        self._x = torch.ones(1, weights[0].shape[1], dtype=torch.bfloat16)

    def compute(self) -> int:
        """One product; the bytes that it read."""
        weight = next(self._weights)
        ops.linear(self._x, weight)
        return weight.nbytes
