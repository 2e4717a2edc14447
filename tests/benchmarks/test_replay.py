"""Replays: as the engine reads, and never better than Belady, who is never better than possible."""

from collections.abc import Callable
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.bench.replay import Cache, Sizes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.trace import Routed
from hmt.weights.eviction import LRU, EvictionPolicy
from hmt_bench.policies import POLICIES, PolicyContext
from hmt_bench.replay import best, replay

LAYERS, EXPERTS = 3, 4
BLOCKS = [BlockId(la, BlockKind.EXPERT, e) for la in range(LAYERS) for e in range(EXPERTS)]

Maker = Callable[[Callable[[], float]], EvictionPolicy]


def maker(name: str, sizes: Sizes) -> Maker:
    return lambda pressure: POLICIES[name](PolicyContext(sizes, pressure=pressure))


experts = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True)


@st.composite
def traces(draw: st.DrawFn, most_steps: int = 12) -> list[Routed]:
    trace = []
    for step in range(draw(st.integers(1, most_steps))):
        for layer in range(LAYERS):
            tokens = draw(st.lists(experts, min_size=1, max_size=2))
            scales = [[1.0 / (1 + rank) for rank in range(len(token))] for token in tokens]
            guess = draw(st.none() | st.lists(experts, min_size=len(tokens), max_size=len(tokens)))
            # A router gives every token as many: cut to the shortest.
            least = min(map(len, tokens))
            tokens, scales = [t[:least] for t in tokens], [s[:least] for s in scales]
            trace.append(Routed(step, layer, tokens, scales, guess))
    return trace


@given(traces(), st.integers(1, len(BLOCKS)), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_beats_the_best(
    trace: list[Routed], slots: int, equal: bool, data: st.DataObject
) -> None:
    size = st.just(7) if equal else st.integers(1, 9)
    sizes = {block: data.draw(size) for block in BLOCKS}
    capacity = slots * 7 if equal else slots * 5 + 9  # a block fits, as in a plan
    skip = data.draw(st.sampled_from([0, len(trace) // 2]))
    bound = best(trace, sizes, capacity, skip=skip)
    for name in POLICIES:
        for guesses in (False, True):

            def make(pressure: Callable[[], float], name: str = name) -> EvictionPolicy:
                return maker(name, sizes)(pressure)

            found = replay(trace, sizes, capacity, make, guesses=guesses, skip=skip)
            assert found.needed_bytes == bound.needed_bytes and found.reads == bound.reads
            assert 0 <= found.rate <= 1
            if not guesses:
                assert found.guessed_bytes == 0
            if not skip:  # else what was read before is still a head start
                assert found.missed_bytes + found.guessed_bytes >= bound.missed_bytes


def fewest_reads(accesses: list[BlockId], slots: int) -> int:
    """Over all choices of victims there are."""

    @cache
    def reads(at: int, cached: frozenset[BlockId]) -> int:
        if at == len(accesses):
            return 0
        block = accesses[at]
        if block in cached:
            return reads(at + 1, cached)
        if len(cached) < slots:
            return 1 + reads(at + 1, cached | {block})
        return 1 + min(reads(at + 1, cached - {victim} | {block}) for victim in cached)

    return reads(0, frozenset())


@given(traces(most_steps=4), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_the_best_is_possible(trace: list[Routed], slots: int) -> None:
    sizes = dict.fromkeys(BLOCKS, 3)
    accesses = [block for record in trace for block in record.blocks()]
    assert best(trace, sizes, 3 * slots).missed_bytes == 3 * fewest_reads(accesses, slots)


@given(traces(), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_cache_holds_what_fits(trace: list[Routed], slots: int) -> None:
    sizes = {block: 1 + block.index for block in BLOCKS}
    used = Cache(LRU(), sizes, 4 * slots)
    for record in trace:
        blocks = record.blocks()
        for block in blocks:
            if block not in used.blocks:
                assert used.admit(block, blocks)
            assert used.used_bytes == sum(sizes[b] for b in used.blocks) <= 4 * slots
            assert sorted(used.policy.eviction_order()) == sorted(used.blocks)


def test_what_is_needed_together_stays_together() -> None:
    """As in the store: an expert of this layer is not dropped for the next one of this layer."""
    sizes = dict.fromkeys(BLOCKS, 1)
    trace = [Routed(0, 0, [[0, 1]], [[1.0, 1.0]]), Routed(1, 0, [[0, 2]], [[1.0, 1.0]])]
    found = replay(trace, sizes, 2, lambda pressure: LRU())
    assert found.missed_bytes == 3
