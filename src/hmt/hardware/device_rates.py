"""What a GPU gives: weights and KV pages that it reads, arithmetic, and what steps cost.

Kernels are measured as steps call them, from CUDA graphs.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hmt.base.units import MIB
from hmt.contracts.encoding import Activations, Encoding
from hmt.contracts.machine import ComputeRates
from hmt.contracts.model import PAGE_TOKENS
from hmt.hardware.attention_rates import CONTEXT, attention_rates, page_layout
from hmt.hardware.gemm_rates import TOKENS, faster_half, gemm_rates
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
_MEMORY_BYTES = 512 * MIB  # the L2 of an H200 holds 50 MiB
_LAYERS = 16
_CALLS = 8
_HAND_OVERS = 50

Timed = Callable[[Callable[[int], object], int, float], float]
"""Seconds of one of `count` calls in turn, found within about `seconds`: (call, count, seconds)."""


def device_rates(
    device: Device,
    seconds: float,
    formats: Sequence[Format] = FORMATS,
    timed: Timed | None = None,
) -> tuple[ComputeRates, float]:
    """A GPU's rates without overheads, and the seconds of handing over to the CPU or back.

    seconds   for each encoding
    timed     None: from a CUDA graph
    """
    measure = timed or partial(_captured_s, device)
    with device.compute_stream(), torch.inference_mode():
        # Random bytes: weights are no zeros.
        memory = torch.empty(_MEMORY_BYTES, dtype=torch.uint8, device=device.where)
        memory.random_()
        share_s = seconds / len(TOKENS)
        gemm = gemm_rates(
            memory, formats, TOKENS, lambda calls: [measure(c, _CALLS, share_s) for c in calls]
        )
        layout = page_layout(rows=True)
        pages = memory[: CONTEXT // PAGE_TOKENS * _LAYERS * layout.page_bytes].zero_()
        read_rate, operations = attention_rates(
            pages.view(CONTEXT // PAGE_TOKENS, _LAYERS, -1),
            layout,
            lambda calls: [measure(call, _LAYERS, seconds / 2) for call in calls],
        )
        sync_s = _hand_over_s(device)
    del memory, pages
    device.empty_cache()
    fastest = max((rate for name, rate in gemm.items() if name.endswith("@1")), default=0.0)
    return ComputeRates(fastest, gemm, read_rate, operations), sync_s


def _captured_s(device: Device, call: Callable[[int], object], count: int, seconds: float) -> float:
    """The mean of the faster half of rounds, of a call in it; calls are captured if they can be."""
    nothing = torch.empty(0, device=device.where)

    def once() -> torch.Tensor:
        for number in range(count):
            call(number)
        return nothing

    once()
    device.synchronize()
    run: Callable[[], object] = once
    try:
        run = device.capture(once).replay
    except RuntimeError:
        device.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        device.synchronize()
        begin = time.perf_counter()
        run()
        device.synchronize()
        times.append((time.perf_counter() - begin) / count)
    return faster_half(times)


def _hand_over_s(device: Device) -> float:
    """From GPU to CPU, or back."""
    there, best = torch.ones(1, 4096, dtype=torch.bfloat16, device=device.where), math.inf
    for _ in range(_HAND_OVERS):
        begin = time.perf_counter()
        there = there.cpu().to(device.where)
        device.synchronize()
        best = min(best, (time.perf_counter() - begin) / 2)
    return best
