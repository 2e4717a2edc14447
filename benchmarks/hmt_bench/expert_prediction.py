"""How well the next layer's router predicted experts in a trace."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hmt.bench.replay import Cache, Sizes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.trace import Routed
from hmt.weights.eviction import EvictionPolicy


def predicted_experts(
    trace: Sequence[Routed], sizes: Sizes, capacity_bytes: int, policy: EvictionPolicy
) -> dict[str, Any] | None:
    """What predictions would have been worth to a cache that reads nothing on a guess.

    recall, absent_recall   share of all needed experts, and of those that were not in the cache,
                            that the router asked a layer early had named
    right_by_rank           of the absent experts that it named first, second, ...: how many in a
                            hundred were needed

    None for a trace without guesses.
    """
    if not any(record.guess for record in trace):
        return None
    cache = Cache(policy, sizes, capacity_bytes)
    named = _Named()
    for record in trace:
        blocks = record.blocks()
        if record.guess is not None:
            named.see(record, cache)
        for block in blocks:
            if block not in cache.blocks:
                cache.admit(block, blocks)
            policy.used(block)
    return named.result()


class _Named:
    """Counts what routers that were asked early had named."""

    def __init__(self) -> None:
        self._needed = self._found = self._absent = self._absent_found = 0
        self._by_rank: defaultdict[int, list[int]] = defaultdict(list)

    def see(self, record: Routed, cache: Cache) -> None:
        for token, guess in zip(record.experts, record.guess or [], strict=True):
            absent = [e for e in token if _block(record, e) not in cache.blocks]
            self._needed += len(token)
            self._found += len(set(token) & set(guess))
            self._absent += len(absent)
            self._absent_found += len(set(absent) & set(guess))
            for rank, expert in enumerate(guess):
                if _block(record, expert) not in cache.blocks:
                    self._by_rank[rank].append(expert in token)

    def result(self) -> dict[str, Any]:
        return {
            "recall": self._found / max(1, self._needed),
            "absent_recall": self._absent_found / max(1, self._absent),
            "right_by_rank": [
                100 * sum(right) / len(right) for _, right in sorted(self._by_rank.items())
            ],
        }


def _block(record: Routed, expert: int) -> BlockId:
    return BlockId(record.layer, BlockKind.EXPERT, expert)
