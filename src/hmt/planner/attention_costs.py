"""What attention costs: how much there is to read and to compute, and how long a CPU takes.

A prompt's pieces make keys and values of latents where that is less to compute, as layers/mla does:
that costs products for each position, and saves operations for each pair of positions.
"""

from dataclasses import dataclass
from math import log

from hmt.base.units import KIB
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.planner.loads import LayerLoad
from hmt.planner.products import operations_rate

SHORT_PAGE, LONG_PAGE = 8 * KIB, 64 * KIB  # one layer's: 2 heads of 64 numbers, 8 of 128
# Arithmetic goes by a head's numbers, not by their bytes: 1 to 4 heads of 64 are as fast as 2.
_SHORT_HEADS_PAGE = 16 * KIB
_FLOATS = "bf16"  # what attention is computed in


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Of a step's tokens in one layer.

    nbytes       of keys and values
    operations   of tokens attending
    expanding    operations of products that make keys and values of latents
    """

    nbytes: float
    operations: float
    expanding: float = 0.0

    def times(self, share: float) -> "AttentionWork":
        """A share of it."""
        return AttentionWork(share * self.nbytes, share * self.operations, share * self.expanding)


def attention_work(
    load: LayerLoad, tokens: float, texts: float, context: float, seen: float
) -> AttentionWork:
    """`tokens` of `texts` with `context` positions each attend to `seen` of them on average."""
    reach = min(context, load.window) if load.window else context
    seen = min(seen, load.window) if load.window else seen
    nbytes = texts * reach * load.kv_bytes
    if load.expanded_from and tokens > texts * load.expanded_from:
        pairs = tokens * seen * load.expanded_operations
        return AttentionWork(nbytes, pairs, texts * reach * load.expanding_operations)
    return AttentionWork(nbytes, tokens * seen * load.kv_operations)


def cpu_operations(machine: Machine) -> float:
    """Per second, of attention on the CPU; 0: not known."""
    return machine.cpu_attention_ops or operations_rate(machine.cpu_ops, _FLOATS)


def device_operations(machine: Machine) -> float:
    """Per second, of attention on the GPU; 0: not known."""
    return machine.device_attention_ops or operations_rate(machine.device_ops, _FLOATS)


def cpu_seconds(
    machine: Machine, load: LayerLoad, work: AttentionWork, ram_rate: float, faster: float
) -> float:
    """Of the CPU.  Rates that are not known cost nothing.

    faster   so many times is memory read, since caches hold it
    """
    reading = _reading_s(machine, load.kv_bytes, work.nbytes, ram_rate, faster)
    operations = cpu_operations(machine)
    if not load.latent:
        operations = _between(machine.cpu_attention_short_ops, operations, load.kv_bytes)
    computing = over(work.operations, operations)
    expanding = over(work.expanding, operations_rate(machine.cpu_ops, _FLOATS))
    # Keys and values of several heads are fetched while others are computed with; all heads share
    # a row of latents, and what is fetched is waited for: of 1 to 128 heads over 4096 positions
    # the sum was 18% too long at most, and the longer one alone 30% too short.
    return (reading + computing if load.latent else max(reading, computing)) + expanding


def device_seconds(machine: Machine, work: AttentionWork, rate: float) -> float:
    """Of the GPU, which reads keys and values at `rate`."""
    expanding = over(work.expanding, operations_rate(machine.device_ops, _FLOATS))
    computing = over(work.operations, device_operations(machine))
    return max(over(work.nbytes, rate), computing) + expanding


def over(amount: float, rate: float) -> float:
    """Seconds; none where the rate is not known."""
    return amount / rate if rate else 0.0


def _reading_s(
    machine: Machine, kv_bytes: float, nbytes: float, ram_rate: float, faster: float
) -> float:
    """Of keys and values, which lie in extents of a page each."""
    long, cached = machine.cpu_attention_rate or ram_rate, machine.cpu_cached_attention_rate
    rate = _of_pages(machine.cpu_attention_short_rate, long, kv_bytes)
    most = _of_pages(machine.cpu_cached_attention_short_rate, cached, kv_bytes)
    found = max(rate, min(faster * rate, most or rate))
    if not nbytes or not found:
        return 0.0
    # Between the caches' rate and memory's, the share of it that comes from memory.
    cold = (most / found - 1) / (most / rate - 1) if most > rate else 1.0
    return nbytes / found + cold * machine.cpu_attention_cold_s


def _of_pages(short: float, long: float, kv_bytes: float) -> float:
    """The rate of extents between, and below, those that were measured; above them level.

    Each takes its own time, and one for each byte: from memory, extents of 8 to 64 KiB took
    0.45, 0.73, 1.35 and 2.58 us.
    """
    nbytes = min(float(LONG_PAGE), kv_bytes * PAGE_TOKENS)
    if not short or not long or not nbytes:
        return long
    byte_s = max(0.0, (LONG_PAGE / long - SHORT_PAGE / short) / (LONG_PAGE - SHORT_PAGE))
    own_s = max(0.0, LONG_PAGE / long - LONG_PAGE * byte_s)
    return nbytes / (own_s + nbytes * byte_s)


def _between(short: float, long: float, kv_bytes: float) -> float:
    """On a straight line over the logarithm of a page's bytes; level beyond both ends."""
    if not short or not long or not kv_bytes:
        return long
    share = log(kv_bytes * PAGE_TOKENS / _SHORT_HEADS_PAGE) / log(LONG_PAGE / _SHORT_HEADS_PAGE)
    return short + (long - short) * min(1.0, max(0.0, share))
