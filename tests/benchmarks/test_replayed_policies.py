"""Cache policies: each in the order of a plain model that keeps every use and sorts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.weights.eviction import LRU, EvictionPolicy, Heat
from hmt_bench.policies import LFU, LRU2, POLICIES, DecayedScore, PolicyContext, WeightAwareLRU

LAYERS, EXPERTS = 3, 4
BLOCKS = [BlockId(la, BlockKind.EXPERT, e) for la in range(LAYERS) for e in range(EXPERTS)]
SIZES = {block: 1000 + 977 * n for n, block in enumerate(BLOCKS)}
RATE, LATENCY_S, HALF_LIFE = 1e9, 1e-6, 3.0


@dataclass
class History:
    """What happened to a policy, in full: uses as (step, number), and who is cached since when."""

    step: int = 0
    number: int = 0
    last_place: tuple[int, int] = (-1, -1)
    uses: dict[BlockId, list[tuple[int, int]]] = field(default_factory=dict)
    ranked: dict[BlockId, int] = field(default_factory=dict)  # when the policy last heard of it
    since: dict[BlockId, int] = field(default_factory=dict)  # number of uses when it came
    age: float = 0.0  # of policies whose ranks grow
    ranks: dict[BlockId, float] = field(default_factory=dict)
    weights: dict[BlockId, float] = field(default_factory=dict)
    given: dict[BlockId, float] = field(default_factory=dict)
    pressure: float = 1.0

    def cached(self, block: BlockId) -> None:
        self.number += 1
        self.ranked[block] = self.number
        self.since[block] = len(self.uses.get(block, []))
        self.ranks[block] = self.age

    def used(self, block: BlockId) -> None:
        self.number += 1
        place = (block.layer, block.index)
        self.step += place <= self.last_place
        self.last_place = place
        self.uses.setdefault(block, []).append((self.step, self.number))
        self.ranked[block] = self.number
        self.given[block] = self.weights.get(block, 1.0)

    def uses_since(self, block: BlockId) -> list[tuple[int, int]]:
        return self.uses.get(block, [])[self.since[block] :]

    def removed(self, block: BlockId) -> None:
        self.age = max(self.age, self.ranks.pop(block))
        del self.ranked[block], self.since[block]


Score = Callable[[History, BlockId], tuple[float, ...]]


def lru(h: History, block: BlockId) -> tuple[float, ...]:
    used = h.uses_since(block)
    # Blocks that were never used come first, the one that came last before the others.
    return (1, used[-1][1]) if used else (0, -h.ranked[block])


def lru2(h: History, block: BlockId) -> tuple[float, ...]:
    # No block is used twice in a step: a second use is told from the first as a new step.
    steps = [step for step, _ in h.uses.get(block, [])]
    return (steps[-2] if len(steps) > 1 else -1.0, h.ranked[block])


def heat(h: History, block: BlockId) -> tuple[float, ...]:
    uses = h.uses.get(block, [])
    now = h.step
    return (sum(2.0 ** ((step - now) / HALF_LIFE) for step, _ in uses), h.ranked[block])


def by_rank(h: History, block: BlockId) -> tuple[float, ...]:
    return (h.ranks[block], h.ranked[block])


def a2cr(h: History, block: BlockId) -> tuple[float, ...]:
    threshold = 0.2 + 0.6 * h.pressure
    used = h.uses_since(block)
    if not used:
        return (0, *lru(h, block))
    score = h.given[block] * math.exp(-0.05 * (h.step - used[-1][0]))
    return (0, *lru(h, block)) if score < threshold else (1, score, 0)


class Case:
    """A policy beside its plain model."""

    def __init__(self, name: str) -> None:
        self.history = h = History()
        around = PolicyContext(SIZES, RATE, LATENCY_S, lambda: h.pressure)
        policies: dict[str, tuple[EvictionPolicy, Score]] = {
            "lru": (LRU(), lru),
            "lfu": (LFU(), by_rank),
            "lru2": (LRU2(), lru2),
            "wa-lru": (WeightAwareLRU(around), by_rank),
            "heat": (Heat(HALF_LIFE), heat),
            "a2cr": (DecayedScore(around), a2cr),
        }
        self.name = name
        self.policy, self.score = policies[name]

    def cached(self, block: BlockId) -> None:
        self.policy.cached(block)
        self.history.cached(block)

    def used(self, block: BlockId) -> None:
        self.policy.used(block)
        self.history.used(block)
        h = self.history
        if self.name == "lfu":
            h.ranks[block] = h.age + len(h.uses_since(block))
        if self.name == "wa-lru":
            seconds = SIZES[block] / RATE + LATENCY_S
            h.ranks[block] = h.age + seconds / SIZES[block]

    def removed(self, block: BlockId) -> None:
        self.policy.removed(block)
        self.history.removed(block)

    def check(self) -> None:
        order = list(self.policy.eviction_order())
        assert sorted(order) == sorted(self.history.ranked)
        scores = [self.score(self.history, block) for block in order]
        for before, after in pairwise(scores):
            # Sums of powers are compared as numbers: what is equal there may go in any order.
            close = math.isclose(before[0], after[0], rel_tol=1e-9)
            assert before[0] < after[0] or close, (self.name, order, scores)
            if self.name != "heat":
                assert before <= after, (self.name, order, scores)


actions = st.lists(
    st.tuples(st.sampled_from(["use", "use", "use", "drop", "come"]), st.sampled_from(BLOCKS)),
    max_size=60,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    done=actions,
    pressures=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 3), min_size=EXPERTS, max_size=EXPERTS),
)
@settings(max_examples=60, deadline=None)
def test_a_policy_orders_as_its_plain_model(
    name: str, done: list[tuple[str, BlockId]], pressures: list[float], weights: list[float]
) -> None:
    case = Case(name)
    cached: set[BlockId] = set()
    for number, (action, block) in enumerate(done):
        case.history.pressure = pressures[number % len(pressures)]
        if number % 7 == 3:
            experts = torch.arange(EXPERTS)[None]
            if isinstance(case.policy, DecayedScore):
                case.policy.routed(block.layer, experts, torch.tensor([weights]))
            average = sum(weights) / EXPERTS
            case.history.weights = {
                BlockId(block.layer, BlockKind.EXPERT, e): min(1.0, w / average)
                for e, w in enumerate(weights)
            }
        if action == "drop" and block in cached:
            cached.remove(block)
            case.removed(block)
        elif action != "drop" and block not in cached:
            cached.add(block)
            case.cached(block)
        if action == "use":
            case.used(block)
        case.check()


def test_old_heat_does_not_stay_for_ever() -> None:
    for name in ("lfu", "heat", "a2cr", "lru2"):
        policy = Case(name).policy
        hot, *others = BLOCKS
        policy.cached(hot)
        for _ in range(50):
            policy.used(hot)
        gone = False
        for number in range(2000):
            block = others[number % len(others)]
            policy.cached(block)
            policy.used(block)
            policy.used(block)
            victim = next(iter(policy.eviction_order()))
            policy.removed(victim)
            if victim == hot:
                gone = True
                break
        assert gone, name


def test_the_smaller_of_two_blocks_stays() -> None:
    policy = WeightAwareLRU(PolicyContext(SIZES, RATE, LATENCY_S))
    small, large = BLOCKS[0], BLOCKS[-1]
    for block in (small, large):
        policy.cached(block)
        policy.used(block)
    assert list(policy.eviction_order()) == [large, small]
