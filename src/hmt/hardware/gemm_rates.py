"""What a processor reaches in products with weights of each encoding, by the number of tokens.

With one token a product is bound by reading its weight, though not every encoding is read as fast
as memory gives it; with hundreds it is bound by arithmetic, and between them other kernels take
over.  Kernels are what is measured, not instructions: a peak says little of what a product reaches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from statistics import fmean

import torch

from hmt.base.units import MIB, round_down, round_up
from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.hardware.timing import interleaved
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.quant import Format, component_bytes, view_weight

TOKENS = (1, 16, 512)
_SHAPE = (4096, 4096)
_CACHES = 2  # so many times the caches' size: a weight is gone when its turn comes again
_LEAST_BYTES = 256 * MIB
_ALIGNMENT = 64
_NUMBERS = 0x38  # each byte: small positive numbers in every float format
CPU_FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.INT8_CHANNEL, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32),
    Format(Encoding.NVFP4, 16, activations=Activations.INT8_TOKEN),
    Format(Encoding.FP8_BLOCK, tile=(128, 128)),
)

Timed = Callable[[list[Callable[[int], object]]], list[float]]
"""Seconds of one of each of some calls, which take the number of the round."""


def cpu_gemm_rates(seconds: float, tokens: Sequence[int] = TOKENS) -> dict[str, float]:
    """All cores' rates, as ComputeRates.gemm has them; `seconds` for each encoding.

    Nothing where memory is too short for it.
    """
    size = max(_LEAST_BYTES, _CACHES * cache_bytes())
    if size > available_host_bytes() // 4:
        return {}
    with memory_for_all_cores(size, _NUMBERS) as memory:
        return gemm_rates(
            memory,
            CPU_FORMATS,
            tokens,
            lambda calls: interleaved(calls, len(CPU_FORMATS) * seconds),
        )


@contextmanager
def memory_for_all_cores(nbytes: int, value: int) -> Iterator[torch.Tensor]:
    """Memory, uint8 [nbytes or a little more], each byte `value`; torch uses all cores meanwhile.

    No gradients are kept.
    """
    threads = torch.get_num_threads()
    buffer = HostBuffer(round_up(nbytes, PAGE_BYTES))
    try:
        buffer.tensor.fill_(value)
        torch.set_num_threads(usable_threads())
        with torch.inference_mode():
            yield buffer.tensor
    finally:
        torch.set_num_threads(threads)
        buffer.discard()


def gemm_rates(
    memory: torch.Tensor, forms: Sequence[Format], tokens: Sequence[int], timed: Timed
) -> dict[str, float]:
    """Rates of products with weights in `memory`, uint8, whose bytes are numbers already."""
    kinds = [(form, weights_in(memory, form, _SHAPE), count) for form in forms for count in tokens]
    taken = timed([_product(weights, count) for _, weights, count in kinds])
    rates = {}
    for (form, weights, count), seconds in zip(kinds, taken, strict=True):
        amount = weights[0].nbytes if count == 1 else 2 * count * prod(_SHAPE)
        rates[f"{form.kernel}@{count}"] = amount / seconds
    return rates


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


def _product(weights: list[WeightTensor], tokens: int) -> Callable[[int], object]:
    """A product; no weight is used again soon."""
    x = torch.ones(tokens, weights[0].shape[1], dtype=torch.bfloat16, device=weights[0].data.device)
    return lambda number: ops.linear(x, weights[number % len(weights)])


def faster_half(times: Sequence[float]) -> float:
    """The mean of the shorter half: in longer ones other processes may have had a part."""
    return fmean(sorted(times)[: (len(times) + 1) // 2])
