"""Cache policies: how they are put together, and the ranking that they share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.weights.eviction import (
    LRU,
    POLICIES,
    DenseByScan,
    open_policy,
)
from hmt.weights.eviction.ranking import Ranking

LAYERS, EXPERTS = 3, 4
BLOCKS = [BlockId(la, BlockKind.EXPERT, e) for la in range(LAYERS) for e in range(EXPERTS)]


@given(st.lists(st.tuples(st.sampled_from(BLOCKS), st.none() | st.integers(0, 5)), max_size=200))
@settings(max_examples=60, deadline=None)
def test_a_ranking_is_a_sorted_dictionary(changes: list[tuple[BlockId, int | None]]) -> None:
    ranking = Ranking()
    plain: dict[BlockId, tuple[int, int]] = {}
    for number, (block, rank) in enumerate(changes):
        if rank is None:
            found = ranking.remove(block)
            assert found == plain.pop(block, (None,))[0]
        else:
            ranking.put(block, rank)
            plain[block] = (rank, number)
        assert len(ranking) == len(plain) and (block in ranking) == (block in plain)
        if number % 3 == 0:
            ordered = list(ranking.ascending())
            assert ordered == sorted(plain, key=plain.__getitem__)
            assert list(ranking.ascending()) == ordered, "looking changes nothing"


def test_a_ranking_forgets_what_is_outdated() -> None:
    ranking = Ranking()
    for number in range(10_000):
        ranking.put(BLOCKS[number % 5], number)
    assert len(ranking._heap) < 200
    for number in range(10_000):
        ranking.put(BLOCKS[number % 5], -number)
        ranking.remove(BLOCKS[(number + 2) % 5])
    assert len(ranking._heap) < 200


@pytest.mark.parametrize("capacity", [2, 5, 10, 15, 19])
def test_dense_blocks_that_go_around_keep_a_part_of_them(capacity: int) -> None:
    """Of a loop of 20 blocks, as many stay as there are slots but one; LRU never hits."""
    loop = [BlockId(n, BlockKind.ATTENTION) for n in range(20)]
    rounds, reads = 10, {}
    for name, policy in (("scan", DenseByScan(LRU())), ("lru", LRU())):
        cached: set[BlockId] = set()
        reads[name] = 0
        for _ in range(rounds):
            for block in loop:
                if block not in cached:
                    reads[name] += 1
                    if len(cached) == capacity:
                        victim = next(iter(policy.eviction_order()))
                        policy.removed(victim)
                        cached.remove(victim)
                    policy.cached(block)
                    cached.add(block)
                policy.used(block)
    assert reads["lru"] == rounds * len(loop)
    # Belady's: each round but the first reads what did not fit, and one in each 19 again.
    best = 20 + (rounds - 1) * (20 - capacity) * 20 / 19
    assert reads["scan"] <= best + 1


def test_experts_go_before_dense_blocks() -> None:
    policy = open_policy("lru")
    dense = [BlockId(layer, BlockKind.ATTENTION) for layer in range(3)]
    for block in (dense[0], BLOCKS[0], dense[1], BLOCKS[1], dense[2]):
        policy.cached(block)
        policy.used(block)
    policy.cached(BlockId(7, BlockKind.FFN))  # asked for, as the next one that is needed
    expected = [BLOCKS[0], BLOCKS[1], dense[2], dense[1], dense[0], BlockId(7, BlockKind.FFN)]
    assert list(policy.eviction_order()) == expected
    policy.removed(dense[1])
    assert dense[1] not in policy.eviction_order()


def test_policies_by_name() -> None:
    for name in POLICIES:
        policy = open_policy(name)
        policy.cached(BLOCKS[0])
        policy.used(BLOCKS[0])
        assert list(policy.eviction_order()) == [BLOCKS[0]]
    with pytest.raises(ConfigError, match="random"):
        open_policy("random")
