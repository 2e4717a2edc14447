"""What attention costs: how much there is to read and to compute, and how long that takes.

A chunk of a prompt expands latents to keys and values where that is less to compute, as
layers/latent does: that costs products for each position, and saves operations for each pair of
positions.
"""

from dataclasses import dataclass

from hmt.contracts.machine import ComputeRates
from hmt.planner.cost.gemm_cost import arithmetic_rate
from hmt.planner.cost.workload import LayerWork


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Of a step's tokens in one layer.

    nbytes       of the KV cache, and of recurrent state
    operations   of tokens attending, and advancing state
    expanding    operations of products that make keys and values of latents
    """

    nbytes: float
    operations: float
    expanding: float = 0.0

    def times(self, share: float) -> "AttentionWork":
        """A share of it."""
        return AttentionWork(share * self.nbytes, share * self.operations, share * self.expanding)


def attention_work(
    load: LayerWork, tokens: float, sequences: float, context: float, seen: float
) -> AttentionWork:
    """`tokens` of `sequences` with `context` positions each attend to `seen` of them on average."""
    reach = min(context, load.window) if load.window else context
    seen = min(seen, load.window) if load.window else seen
    # A token multiplies and adds each number of a state three times; a step reads and writes it.
    nbytes = sequences * (reach * load.kv_bytes + 2 * load.state_bytes)
    updates = tokens * 6 * load.state_bytes / 4
    if load.selected and seen > load.selected:
        # Every token scores all that it sees, and reads the rows that it selects.
        rows = min(tokens * load.selected, sequences * context)
        nbytes = rows * load.kv_bytes + sequences * context * load.index_bytes
        scoring = tokens * seen * load.index_operations
        return AttentionWork(nbytes, tokens * load.selected * load.kv_operations + scoring)
    if load.expanded_from and tokens > sequences * load.expanded_from:
        pairs = tokens * seen * load.expanded_operations
        return AttentionWork(nbytes, pairs, sequences * reach * load.expanding_operations)
    return AttentionWork(nbytes, tokens * seen * load.kv_operations + updates)


def attention_ops(rates: ComputeRates) -> float:
    """Operations per second of prefill attention; 0: not known."""
    return rates.attention_ops or arithmetic_rate(rates.gemm)


def attention_seconds(rates: ComputeRates, work: AttentionWork, read_rate: float) -> float:
    """Of one layer.  Rates that are not known cost nothing.

    read_rate   of memory, where that of attention is not known
    """
    reading_s = over(work.nbytes, rates.attention_read_rate or read_rate)
    computing_s = over(work.operations, attention_ops(rates))
    return max(reading_s, computing_s) + over(work.expanding, arithmetic_rate(rates.gemm))


def over(amount: float, rate: float) -> float:
    """Seconds; none where the rate is not known."""
    return amount / rate if rate else 0.0
