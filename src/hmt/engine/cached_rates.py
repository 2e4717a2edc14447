"""How much faster weights are read that the CPU's caches hold, in steps as they are.

Memory that is read from end to end again and again stays in caches until it is nearly as large as
they are.  In a step other things pass through them as well: on a Xeon's slice of a cache, 100 MB
were read at 1.6 times memory's rate in a loop, and at 1.2 times in steps.  So steps of a wider
model are timed, with few to many of its layers.
"""

from hmt.base.units import MIB, parse_bytes
from hmt.contracts.machine import Machine
from hmt.engine.cpu_step_rates import Case, decoded
from hmt.engine.probe_models import MANY, wide_model
from hmt.engine.step_rates import without_fixed
from hmt.planner.caches import Caches

_LAYERS = (1, 2, 4)


def cached_rates(machine: Machine, seconds: float) -> dict[str, float]:
    """Bytes per second, by how much is read in a step, as Machine has them; `seconds` for each.

    machine   knows `cached_rates` of what is read again and again: those of less than a layer stay,
              and the largest step here is taken to be read as they say

    Raises what loading raises.
    """
    bare = without_fixed(machine)
    cases = [Case(wide_model(layers)) for layers in (*_LAYERS, MANY)]
    measured = [(each.nbytes, each.kernels_s) for each in decoded(bare, cases, seconds)]
    *fewer, (largest, all_s) = measured
    if not all_s:
        return dict(machine.cached_rates)
    known = {parse_bytes(size): rate for size, rate in machine.cached_rates.items()}
    slowest = machine.ram_read_rate * Caches(machine).faster(largest)
    found = {}
    for nbytes, taken_s in fewer:
        # Layers are alike: what products cost beyond bytes goes with their number, too.
        found[round(nbytes)] = slowest * (nbytes / taken_s) / (largest / all_s)
    least = min(found)
    found |= {size: rate for size, rate in known.items() if not least <= size <= largest}
    rates, rate = {}, 0.0
    for size in sorted(found, reverse=True):  # more is never read faster, whatever chance says
        rate = max(rate, found[size])
        rates[f"{size // MIB}MiB"] = rate
    return rates
