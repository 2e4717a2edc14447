"""What a GPU gives: weights and keys and values that it reads, arithmetic, and what steps cost.

Kernels are measured as steps call them, from CUDA graphs; steps with the small model that comes
with HMT.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from hmt.base.units import MIB
from hmt.contracts.encoding import Activations, Encoding
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine import attention_rates, product_rates
from hmt.engine.attention_rates import AttentionRates
from hmt.engine.device_products import layer_rates
from hmt.engine.device_steps import DeviceSteps, device_steps
from hmt.engine.product_rates import ProductRates
from hmt.kernels import ops
from hmt.memory.device import Device
from hmt.quant import Format

FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.INT8_CHANNEL, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32),
    Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
    Format(Encoding.NVFP4, 16),
)
QUICK_FORMATS = FORMATS[:3]
_TOKENS = (8, 32, 512)  # each is compiled for some seconds when it first comes
_MEMORY_BYTES = 512 * MIB  # the L2 of an H200 holds 50 MiB
_CONTEXT, _LAYERS = 4096, 16
_USERS = 8  # who read together
# Positions of each: what attention takes however few there are is a part of what layers take.
_SHORT, _LONG, _LAYERS_OF_SHORT = 512, 8192, 64
_HAND_OVERS = 50
_QUICK_SCHEMES = ("w4a16",)  # of steps of dense layers, where nothing is known of steps


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """See Machine; 0 or empty where nothing was measured."""

    read_rate: float = 0.0
    sync_s: float = 0.0
    products: ProductRates = field(default_factory=ProductRates)
    attention: AttentionRates = field(default_factory=AttentionRates)
    steps: DeviceSteps = field(default_factory=DeviceSteps)

    def slower(self, factor: float) -> "DeviceRates":
        """With fixed times that are so many times as long."""
        return replace(self, sync_s=self.sync_s * factor, steps=self.steps.slower(factor))

    def of(self, machine: Machine) -> Machine:
        """The machine with them."""
        return self.steps.of(
            replace(
                machine,
                device_read_rate=self.read_rate,
                device_rates=self.products.bytes_per_s,
                device_ops=self.products.operations_per_s,
                device_attention_rate=self.attention.bytes_per_s,
                device_attention_ops=self.attention.operations_per_s,
                device_attention_several=self.attention.several_bytes_per_s,
                sync_s=self.sync_s,
            )
        )


def device_rates(
    device: Device,
    machine: Machine,
    seconds: float,
    *,
    gpu_id: str,
    formats: Sequence[Format] = FORMATS,
    whole: bool = True,
    known: DeviceSteps | None = None,
    timed: Callable[[Callable[[int], object], int, float], float] | None = None,
) -> DeviceRates:
    """Measure a GPU; `machine` has the rates of everything else.  `seconds` for each encoding.

    whole                         measure steps in all encodings, also with experts, and memory of a
                                  process, in one of its own
    known                         what steps cost; None: measure that, too, which takes a minute
    timed(call, count, seconds)   seconds of one of `count` calls in turn; None: from a CUDA graph

    Raises what loading a small model raises.
    """
    timed = timed or _captured_s
    with device.computing(), torch.inference_mode():
        # Random ones: weights are no zeros.
        memory = torch.empty(_MEMORY_BYTES, dtype=torch.uint8, device=device.where)
        memory.random_()
        products = layer_rates(memory, formats, _TOKENS, seconds, timed)
        layout = ops.PageLayout(ops.PageEncoding.BF16, 8, 128, 128, rows=True)
        pages = memory[: _CONTEXT // PAGE_TOKENS * _LAYERS * layout.page_bytes].zero_()
        attention = attention_rates.rates_in(
            pages.view(_CONTEXT // PAGE_TOKENS, _LAYERS, -1),
            layout,
            seconds,
            lambda call, share: timed(call, _LAYERS, share),
        )
        one, several = (
            _reading_rate(memory, layout, users, lambda call, n: timed(call, n, seconds / 4))
            for users in (1, _USERS)
        )
        attention = replace(attention, bytes_per_s=one, several_bytes_per_s=several)
        sync_s = _hand_over_s(device)
    del memory, pages
    device.trim()
    found = DeviceRates(
        max(products.bytes_per_s.values(), default=0.0), sync_s, products, attention
    )
    if known is not None:
        return replace(found, steps=known)
    options = {"gpu_id": gpu_id, "gpu_memory": "2GiB", "host_memory": "512MiB"}
    how = {} if whole else {"schemes": _QUICK_SCHEMES, "kinds": ("",)}
    steps = device_steps(found.of(machine), seconds, options, whole=whole, **how)
    return replace(found, steps=steps)


def _reading_rate(
    memory: torch.Tensor,
    layout: ops.PageLayout,
    users: int,
    timed: Callable[[Callable[[int], object], int], float],
) -> float:
    """Bytes per second of keys and values that each of `users` has more of; `memory` is zeroed."""
    taken = []
    for context in (_SHORT, _LONG):
        count = users * context // PAGE_TOKENS
        nbytes = count * layout.page_bytes
        layers = min(_LAYERS_OF_SHORT, memory.nbytes // nbytes)
        pages = memory[: layers * nbytes].zero_().view(count, layers, -1)
        rate = attention_rates.reading_rate(pages, layout, users, timed)
        taken.append((nbytes, nbytes / rate))
    (few, short_s), (many, long_s) = taken
    return (many - few) / max(long_s - short_s, long_s / 2)


def _captured_s(call: Callable[[int], object], count: int, seconds: float) -> float:
    """The mean of the faster half of rounds, of a call in it; calls are captured if they can be."""
    for number in range(count):
        call(number)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()

    def once() -> None:
        for number in range(count):
            call(number)

    run: Callable[[], object] = once
    try:
        with torch.cuda.graph(graph):
            once()
        run = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        stream.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / count)
    return product_rates.faster_half(times)


def _hand_over_s(device: Device) -> float:
    """From GPU to CPU, or back."""
    there, best = torch.ones(1, 4096, dtype=torch.bfloat16, device=device.where), math.inf
    for _ in range(_HAND_OVERS):
        begin = time.perf_counter()
        there = there.cpu().to(device.where)
        device.synchronize()
        best = min(best, (time.perf_counter() - begin) / 2)
    return best
