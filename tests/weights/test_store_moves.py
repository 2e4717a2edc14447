"""The store and its pool: blocks move to make room, never while somebody has them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from doubles import Bench, block_specs, open_store, write_checkpoint
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hmt.base.errors import BudgetError, DiskReadError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import Presence, Priority
from hmt.kernels.weight_cache import WeightCache
from hmt.memory import PAGE_BYTES, PoolStats
from hmt.weights.eviction import LRU

SPECS = {block.id: block for block in block_specs()}
LEASABLE = [block for block in SPECS if block.kind is not BlockKind.EMBEDDING]
ROUTERS = [BlockId(layer, BlockKind.ROUTER) for layer in range(3)]
EXPERT, HEAD = BlockId(0, BlockKind.EXPERT, 0), BlockId(TRUNK, BlockKind.HEAD, 0)

Views = Mapping[str, WeightTensor]


ADDRESS: WeightCache[int] = WeightCache()


@pytest.fixture(scope="module", autouse=True)
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    StoreMachine.folder, StoreMachine.tensors = folder, write_checkpoint(folder)
    yield folder, StoreMachine.tensors


def assert_right(block: BlockId, views: Views, tensors: dict[str, torch.Tensor]) -> None:
    for param in SPECS[block].params:
        expected = tensors[param.sources[0]]
        expected = expected if param.rows is None else expected[slice(*param.rows)]
        view = views[param.name]
        assert torch.equal(view.data, expected), (block, param.name)
        # As kernels do: what is kept with a view must end with its place.
        if ADDRESS.get(view) is None:
            ADDRESS[view] = view.data.data_ptr()
        assert ADDRESS[view] == view.data.data_ptr()


def slot_stats(bench: Bench) -> PoolStats:
    return bench.pools[1].stats()


class StoreMachine(RuleBasedStateMachine):
    """Leases are taken, held and ended in any order, over slots for a few blocks of four sizes."""

    folder: Path
    tensors: dict[str, torch.Tensor]

    @initialize(pages=st.integers(14, 48), poison=st.booleans())
    def begin(self, pages: int, poison: bool) -> None:
        self.limit = pages * PAGE_BYTES
        self.bench = open_store(self.folder, slots_bytes=self.limit, poison=poison)
        self.held: list[tuple[BlockId, Views, ExitStack, int]] = []

    def slot_bytes(self, block: BlockId) -> int:
        return self.bench.layouts[block].slot_bytes

    @rule(block=st.sampled_from(LEASABLE))
    def lease(self, block: BlockId) -> None:
        leased = {other for other, *_ in self.held} | {block}
        fits = sum(map(self.slot_bytes, leased)) <= self.limit
        stack = ExitStack()
        try:
            views = stack.enter_context(self.bench.store.lease(block))
        except BudgetError:
            assert not fits, "what fits beside the leases can be leased"
            return
        except DiskReadError:
            return
        assert fits
        self.held.append((block, views, stack, self.address(views)))

    # What is drawn must not depend on what is held: which lease a failed read ends is a race.

    @rule(which=st.integers(0, 100))
    def end_lease(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held))[2].close()

    @rule(
        blocks=st.lists(st.sampled_from(LEASABLE), max_size=6), priority=st.sampled_from(Priority)
    )
    def request(self, blocks: list[BlockId], priority: Priority) -> None:
        self.bench.store.request(blocks, priority)

    @rule(blocks=st.lists(st.sampled_from(LEASABLE), max_size=6, unique=True))
    def lease_each(self, blocks: list[BlockId]) -> None:
        seen = []
        while self.held:
            self.held.pop()[2].close()
        try:
            with self.bench.store.lease_each(blocks) as groups:
                for group in groups:
                    for block, views in group:
                        assert_right(block, views, self.tensors)
                        seen.append(block)
            assert seen == blocks
        except DiskReadError:
            pass

    @rule(failing=st.integers(1, 5))
    def fail_a_read(self, failing: int) -> None:
        number = self.bench.reader.reads + failing
        self.bench.reader.fails = lambda read: read == number

    @invariant()
    def leases_hold(self) -> None:
        for block, views, _, address in self.held:
            assert self.address(views) == address
            assert_right(block, views, self.tensors)

    @invariant()
    def the_pool_keeps_its_limit(self) -> None:
        stats = slot_stats(self.bench)
        assert stats.in_use_bytes <= stats.backed_bytes <= self.limit
        assert stats.internal == 0, "a slot is exactly its block"

    @staticmethod
    def address(views: Views) -> int:
        return next(iter(views.values())).data.data_ptr()

    def teardown(self) -> None:
        while self.held:
            self.held.pop()[2].close()
        self.bench.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def full(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> Iterator[Bench]:
    """Slots that hold one router, an expert and another router, in this order and no page more."""
    bench = open_store(checkpoint[0], slots_bytes=16 * PAGE_BYTES, policy=LRU())
    sizes = [
        bench.layouts[block].slot_bytes // PAGE_BYTES for block in (*ROUTERS[:2], EXPERT, HEAD)
    ]
    assert sizes == [1, 1, 14, 2]
    for block in (ROUTERS[0], EXPERT, ROUTERS[1], EXPERT):
        with bench.store.lease(block):
            pass
    yield bench
    bench.close()


def test_an_innocent_block_moves_and_is_not_evicted(
    full: Bench, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    """The head needs two pages; the two coldest blocks leave one on each side of the expert."""
    with full.store.lease(HEAD) as views:
        assert_right(HEAD, views, checkpoint[1])
    assert list(full.store._policy.eviction_order()) == [EXPERT, HEAD]
    reads = full.reader.reads
    with full.store.lease(EXPERT) as views:
        assert_right(EXPERT, views, checkpoint[1])
    stats = slot_stats(full)
    assert (stats.moves, stats.moved_bytes, stats.arenas) == (1, 14 * PAGE_BYTES, 1)
    assert full.reader.reads == reads, "it was not read again"


def test_a_leased_block_stays_and_what_fits_in_sum_fits(
    full: Bench, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    with full.store.lease(EXPERT) as leased:
        address = leased["up"].data.data_ptr()
        with full.store.lease(HEAD) as views:
            assert_right(HEAD, views, checkpoint[1])
            assert_right(EXPERT, leased, checkpoint[1])
        assert leased["up"].data.data_ptr() == address
    stats = slot_stats(full)
    assert stats.moves == 0 and stats.arenas == 2, "the head lies outside of the arena"
    for block in (EXPERT, *ROUTERS[:2]):
        with full.store.lease(block) as views:
            assert_right(block, views, checkpoint[1])
    assert full.store.presence(EXPERT) is Presence.HIT
    assert slot_stats(full).arenas == 1, "which ended with the head"


def test_a_block_that_is_being_read_does_not_move(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """One read of the expert is still to come when the routers on both sides of it go."""
    bench = open_store(checkpoint[0], slots_bytes=16 * PAGE_BYTES)
    begun, go_on = threading.Event(), threading.Event()
    with bench.store.lease(ROUTERS[0]):
        pass
    late = bench.reader.reads + 1

    def fails(number: int) -> bool:
        if number == late:
            begun.set()
            assert go_on.wait(30)
        return False

    bench.reader.fails = fails
    bench.store.request([EXPERT], Priority.PREFETCH)
    assert begun.wait(30)
    for block in (ROUTERS[1], HEAD):
        with bench.store.lease(block) as views:
            assert_right(block, views, checkpoint[1])
    assert bench.store.presence(EXPERT) is Presence.PENDING
    assert slot_stats(bench).arenas == 2 and slot_stats(bench).moves == 0
    go_on.set()
    with bench.store.lease(EXPERT) as views:
        assert_right(EXPERT, views, checkpoint[1])
    bench.close()
