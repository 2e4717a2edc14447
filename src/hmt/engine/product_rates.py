"""What the CPU gives products with weights of each encoding: bytes with one token, and arithmetic.

With one token a product is bound by reading its weight, though not every encoding is read as fast
as memory gives it; with hundreds it is bound by arithmetic.  Kernels are what is measured, not
instructions: a card's or a core's peak says little of what a product reaches.
"""

import math
import time
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from hmt.base.units import MIB, round_down, round_up
from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.quant import Format, component_bytes, view_weight

_SHAPE = (4096, 4096)
_TOKENS = 256  # from here on arithmetic is what counts
_CACHES = 2  # so many times the caches' size: a weight is gone when its turn comes again
_LEAST_BYTES = 256 * MIB
_ALIGNMENT = 64
_NUMBERS = 0x38  # each byte: small positive numbers in every float format
_FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.INT8_CHANNEL, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32),
    Format(Encoding.NVFP4, 16, activations=Activations.INT8_TOKEN),
)


@dataclass(frozen=True, slots=True)
class ProductRates:
    """By kernel, as `Format.kernel` names it; empty where nothing was measured."""

    bytes_per_s: dict[str, float] = field(default_factory=dict)
    operations_per_s: dict[str, float] = field(default_factory=dict)


def product_rates(seconds: float) -> ProductRates:
    """All cores' rates; `seconds` for each encoding.  Nothing where memory is too short for it."""
    size = max(_LEAST_BYTES, _CACHES * cache_bytes())
    if size > available_host_bytes() // 4:
        return ProductRates()
    before = torch.get_num_threads()
    buffer = HostBuffer(round_up(size, PAGE_BYTES))
    found = ProductRates()
    try:
        buffer.tensor.fill_(_NUMBERS)
        torch.set_num_threads(usable_threads())
        with torch.inference_mode():
            for form in _FORMATS:
                weights = weights_in(buffer.tensor, form, _SHAPE)
                read_s = _best_s(weights, 1, seconds / 2)
                found.bytes_per_s[form.kernel] = weights[0].nbytes / read_s
                operations = 2 * _TOKENS * _SHAPE[0] * _SHAPE[1]
                found.operations_per_s[form.kernel] = operations / _best_s(
                    weights, _TOKENS, seconds / 2
                )
                del weights
    finally:
        torch.set_num_threads(before)
        buffer.discard()
    return found


def weights_in(memory: torch.Tensor, form: Format, shape: tuple[int, int]) -> list[WeightTensor]:
    """As many weights as fit, in memory (uint8) whose bytes are numbers already."""
    parts = component_bytes(form, shape)
    ends = list(accumulate(round_up(part, _ALIGNMENT) for part in parts))
    step = round_up(ends[-1], PAGE_BYTES)
    weights = []
    for begin in range(0, round_down(memory.nbytes, PAGE_BYTES) - ends[-1] + 1, step):
        starts = (begin + at for at in (0, *ends))
        buffers = (memory[at : at + part] for at, part in zip(starts, parts, strict=False))
        weights.append(view_weight(form, shape, *buffers))
    return weights


def _best_s(weights: list[WeightTensor], tokens: int, seconds: float) -> float:
    """The fastest call within `seconds`: in slower ones somebody else had a part of the machine.

    The first, which sets things up, is not counted.
    """
    x = torch.ones(tokens, weights[0].shape[1], dtype=torch.bfloat16)
    ops.linear(x, weights[-1])
    best, end, calls = math.inf, time.perf_counter() + seconds, 0
    while best == math.inf or time.perf_counter() < end:
        begin = time.perf_counter()
        ops.linear(x, weights[calls % len(weights)])
        best, calls = min(best, time.perf_counter() - begin), calls + 1
    return best
