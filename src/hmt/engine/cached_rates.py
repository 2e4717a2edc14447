"""What the CPU's caches do to steps.

Weights that they hold are read faster, and calls take longer where they hold nothing of them.
Memory that is read from end to end again and again stays in caches until it is nearly as large as
they are.  In a step other things pass through them as well: on a Xeon's slice of a cache, 100 MB
were read at 1.6 times memory's rate in a loop, and at 1.2 times in steps.  So products are timed
with pauses between them, and steps of a wider model, with few to many of its layers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from hmt.base.units import MIB, parse_bytes
from hmt.contracts.machine import Machine
from hmt.engine.cpu_pace import CpuPace, Held
from hmt.engine.cpu_step_rates import Case, decoded
from hmt.engine.probe_models import FEW, MANY, NARROW, small_model, wide_model
from hmt.engine.product_rates import ProductRates
from hmt.engine.step_rates import without_fixed
from hmt.planner.caches import Caches

_HELD_SHARES = 1 / 4, 1.0  # of what a yardstick holds, which is half of the caches
_LAYERS = (1, 2, 4)
_KERNEL = "bf16"


@dataclass(frozen=True, slots=True)
class InSteps:
    """What was measured of steps.

    rates     bytes per second, by how much is read, as Machine.cached_rates has them
    calls_s   seconds of what calls kernels, by the bytes that a step reads, ascending
    """

    rates: dict[str, float] = field(default_factory=dict)
    calls_s: dict[float, float] = field(default_factory=dict)


def held_rates(
    held: Callable[[float], Held], products: ProductRates, memory_rate: float
) -> tuple[dict[str, float], float]:
    """Machine.cached_rates of what caches hold well, and the pace that goes with them.

    held          times products with a share of what a yardstick holds
    memory_rate   of memory, which rates are relative to: Machine.ram_read_rate
    """
    found, seconds = dict[int, float](), 0.0
    from_memory = products.bytes_per_s.get(_KERNEL)
    for share in _HELD_SHARES if from_memory else ():
        took = held(share)
        seconds, rate = took.seconds, _reading_rate(took, products)
        if rate and from_memory and took.nbytes >= MIB:  # of less nothing is to be gained
            found[took.nbytes] = rate / from_memory * memory_rate
    return _descending(found), seconds


def _reading_rate(took: Held, products: ProductRates) -> float:
    """Bytes per second of the weights of products that `took` so long with their rows; 0: unknown.

    A share of them comes from memory, which rows take longer with, too (see Products): between the
    two rates that were measured everything is on one straight line over the time of a byte.
    """
    slow, fast = products.bytes_per_s[_KERNEL], products.cached_per_s.get(_KERNEL, 0.0)
    if not took.seconds or fast <= slow:
        return 0.0
    slow_row_s = products.row_s.get(f"{_KERNEL}@1", 0.0)
    ends = (
        took.nbytes / fast + took.rows * products.cached_row_s.get(_KERNEL, 0.0),
        took.nbytes / slow + took.rows * slow_row_s,
    )
    share = (took.seconds - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.0
    share = min(1.0, max(0.0, share))
    return 1 / ((1 - share) / fast + share / slow)


def cached_rates(
    machine: Machine, seconds: float, pace: Callable[[], CpuPace] = CpuPace
) -> InSteps:
    """What steps find in caches; `seconds` for each of a few models.

    machine   knows `cached_rates` of what caches hold well: those of less than a model here reads
              stay, and the largest step here is taken to be read as they say

    Raises what loading raises.
    """
    bare = without_fixed(machine)
    small: list[AbstractContextManager[Path]] = [small_model(FEW), small_model(MANY)]
    wide = [wide_model(1, NARROW), *(wide_model(layers) for layers in (*_LAYERS, MANY))]
    steps = decoded(bare, [Case(model) for model in (*small, *wide)], seconds, pace)
    calls_s = {each.nbytes: each.calls_s for each in steps}
    # A small model's rows are short: its products say little of reading.
    *fewer, (largest, all_s) = [(each.nbytes, each.kernels_s) for each in steps[len(small) :]]
    if not all_s:
        return InSteps(dict(machine.cached_rates), calls_s)
    known = {parse_bytes(size): rate for size, rate in machine.cached_rates.items()}
    slowest = machine.ram_read_rate * Caches(machine).faster(largest)
    found = {}
    for nbytes, taken_s in fewer:
        # Layers are alike: what products cost beyond bytes goes with their number, too.
        found[round(nbytes)] = slowest * (nbytes / taken_s) / (largest / all_s)
    least = min(found)
    found |= {size: rate for size, rate in known.items() if not least <= size <= largest}
    return InSteps(_descending(found), calls_s)


def _descending(found: dict[int, float]) -> dict[str, float]:
    """More is never read faster, whatever chance says."""
    sizes = sorted(found, reverse=True)
    rates = accumulate((found[size] for size in sizes), max)
    return {f"{size // MIB}MiB": rate for size, rate in zip(sizes, rates, strict=True)}
