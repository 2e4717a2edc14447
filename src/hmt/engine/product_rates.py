"""What a device gives products with weights of each encoding: bytes with one token, and arithmetic.

With one token a product is bound by reading its weight, though not every encoding is read as fast
as memory gives it; with hundreds it is bound by arithmetic, and between them by both, and by which
kernel there is.  So it is measured with several numbers of tokens.  Kernels are what is measured,
not instructions: a card's or a core's peak says little of what a product reaches.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

import torch

from hmt.base.units import MIB, round_down, round_up
from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.engine.by_turns import by_turns
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import PAGE_BYTES, HostBuffer, available_host_bytes, cache_bytes
from hmt.quant import Format, component_bytes, view_weight

_SHAPE, _NARROW = (4096, 4096), (4096, 512)  # equally many rows
_CACHED_SHAPE, _CACHED_NARROW = (1024, 2048), (1024, 512)  # the same in what caches hold
_MANY = 512  # from here on the rate of arithmetic changes little
QUICK_TOKENS, FULL_TOKENS = (4, 32, 128), (2, 4, 8, 16, 32, 64, 128, _MANY)
_LEAST_SHARE = 0.5  # of a long row's time is its weights', whatever chance says
_CACHES = 2  # so many times the caches' size: a weight is gone when its turn comes again
_CACHED_SHARE = 8  # of the caches' size, which weights fit well
_LEAST_BYTES = 256 * MIB
_ALIGNMENT = 64
_NUMBERS = 0x38  # each byte: small positive numbers in every float format
_FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.INT8_CHANNEL, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
    Format(Encoding.INT4_GROUP, 32),
    Format(Encoding.NVFP4, 16, activations=Activations.INT8_TOKEN),
    Format(Encoding.FP8_BLOCK, tile=(128, 128)),
)


@dataclass(frozen=True, slots=True)
class ProductRates:
    """By kernel, as `Format.kernel` names it; empty where nothing was measured.

    operations_per_s   with many tokens, and under KERNEL@TOKENS with fewer
    row_s              of a row for each token, beyond its weights; the same, and KERNEL@1
    cached_per_s, cached_row_s   bytes_per_s, and row_s with one token, of weights that caches hold
    """

    bytes_per_s: dict[str, float] = field(default_factory=dict)
    operations_per_s: dict[str, float] = field(default_factory=dict)
    row_s: dict[str, float] = field(default_factory=dict)
    cached_per_s: dict[str, float] = field(default_factory=dict)
    cached_row_s: dict[str, float] = field(default_factory=dict)


def product_rates(
    seconds: float,
    tokens: Sequence[int] = FULL_TOKENS,
    beside: Sequence[Callable[[int], object]] = (),
) -> tuple[ProductRates, list[float]]:
    """All cores' rates; `seconds` for each encoding.  Nothing where memory is too short for it.

    And the seconds of each of the calls that were timed by turns `beside` them.
    """
    size = max(_LEAST_BYTES, _CACHES * cache_bytes())
    if size > available_host_bytes() // 4:
        return ProductRates(), []
    before = torch.get_num_threads()
    buffer = HostBuffer(round_up(size, PAGE_BYTES))
    beside_s: list[float] = []

    def timed(products: Sequence[Product]) -> list[float]:
        calls = [_call(*product) for product in products]
        found = by_turns([*calls, *beside], len(_FORMATS) * seconds)
        beside_s.extend(found[len(calls) :])
        return found[: len(calls)]

    try:
        buffer.tensor.fill_(_NUMBERS)
        torch.set_num_threads(usable_threads())
        with torch.inference_mode():
            return rates_in(buffer.tensor, _FORMATS, tokens, timed), beside_s
    finally:
        torch.set_num_threads(before)
        buffer.discard()


Product = tuple[list[WeightTensor], int]  # with each weight in turn, and so many tokens


def rates_in(
    memory: torch.Tensor,
    forms: Sequence[Format],
    tokens: Sequence[int],
    timed: Callable[[Sequence[Product]], list[float]],
) -> ProductRates:
    """Rates of products with weights in `memory`, uint8, whose bytes are numbers already.

    Two widths tell what rows take from what weights do.

    timed(products)   seconds of one of each
    """
    products: list[Product] = []
    for form in forms:
        wide, narrow = (weights_in(memory, form, shape) for shape in (_SHAPE, _NARROW))
        products += [(weights, count) for count in (1, *tokens) for weights in (wide, narrow)]
        for shape in (_CACHED_SHAPE, _CACHED_NARROW):
            few = weights_in(memory, form, shape)
            products.append((few[: max(1, cache_bytes() // _CACHED_SHARE // few[0].nbytes)], 1))
    found, taken = ProductRates(), iter(zip(products, timed(products), strict=True))
    for form in forms:
        for count in (1, *tokens):
            weight_s, row_s, weight_bytes = _apart(next(taken), next(taken))
            name = form.kernel if count in (1, max(tokens)) else f"{form.kernel}@{count}"
            if count == 1:
                found.bytes_per_s[form.kernel] = weight_bytes / weight_s
            else:
                found.operations_per_s[name] = 2 * count / weight_s
            found.row_s[name if count > 1 else f"{name}@1"] = row_s / count
        weight_s, row_s, weight_bytes = _apart(next(taken), next(taken))
        found.cached_per_s[form.kernel] = weight_bytes / weight_s
        found.cached_row_s[form.kernel] = row_s
    return found


def _apart(
    wide: tuple[Product, float], narrow: tuple[Product, float]
) -> tuple[float, float, float]:
    """Seconds of a weight without its row, and of a row, from those of both; a weight's bytes."""
    ((wide_weights, _), wide_s), ((narrow_weights, _), narrow_s) = wide, narrow
    (rows, columns), (_, few_columns) = wide_weights[0].shape, narrow_weights[0].shape
    nbytes = wide_weights[0].nbytes / (rows * columns)
    each_s, narrow_each_s = wide_s / (rows * columns), narrow_s / (rows * few_columns)
    row_s = (narrow_each_s - each_s) / (1 / few_columns - 1 / columns)
    if row_s <= 0:  # long rows are slower than short ones: no row costs anything then
        return (each_s * narrow_each_s) ** 0.5, 0.0, nbytes
    return max(each_s - row_s / columns, _LEAST_SHARE * each_s), row_s, nbytes


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


def _call(weights: list[WeightTensor], tokens: int) -> Callable[[int], object]:
    """A product; no weight is used again soon."""
    x = torch.ones(tokens, weights[0].shape[1], dtype=torch.bfloat16)
    return lambda number: ops.linear(x, weights[number % len(weights)])


def usual_s(call: Callable[[int], object], seconds: float) -> float:
    """Seconds of a `call(number)`: the mean of the faster half of those made within `seconds`.

    In the slower ones somebody else may have had a part of the machine; and a step, which consists
    of many, is not as fast as the fastest.  The first, which sets things up, is not counted.
    """
    call(-1)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - begin)
    return faster_half(times)


def faster_half(times: Sequence[float]) -> float:
    """The mean of the shorter half."""
    return fmean(sorted(times)[: (len(times) + 1) // 2])
