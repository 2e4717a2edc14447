"""The store: right numbers from every tier, nothing evicted under lease, faults contained."""

import random
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from doubles import (
    CHUNKS,
    EXPERTS,
    LAYERS,
    VOCABULARY,
    block_specs,
    open_store,
    write_checkpoint,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError, DiskReadError, NumericsError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import Presence, Priority
from hmt.kernels import ops

SPECS = {block.id: block for block in block_specs()}
LEASABLE = [block for block in SPECS if block.kind is not BlockKind.EMBEDDING]
EMBEDDING = BlockId(TRUNK, BlockKind.EMBEDDING)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder)


def assert_right(
    block: BlockId, views: Mapping[str, WeightTensor], tensors: dict[str, torch.Tensor]
) -> None:
    for param in SPECS[block].params:
        expected = tensors[param.sources[0]]
        if param.rows is not None:
            expected = expected[slice(*param.rows)]
        assert torch.equal(views[param.name].data, expected), (block, param.name)


def largest(layouts: Mapping[BlockId, object]) -> int:
    return max(layout.slot_bytes for layout in layouts.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_every_block_is_right_wherever_it_lives(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], share: float
) -> None:
    folder, tensors = checkpoint
    chosen = set(random.Random(3).sample(LEASABLE, int(share * len(LEASABLE))))
    bench = open_store(folder, slots_bytes=1 << 17, resident=chosen.__contains__)
    bench.store.load_residents()
    for _ in range(2):
        for block in LEASABLE:
            with bench.store.lease(block) as views:
                assert_right(block, views, tensors)
    if share == 1.0:
        assert bench.store.counters.misses == bench.store.counters.pending == 0
    bench.close()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(0, 200_000),
    fault_rate=st.sampled_from([0, 0, 0.05]),
)
def test_random_threads_and_faults(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], seed: int, slots: int, fault_rate: float
) -> None:
    """Three threads lease, nest and request at random while reads fail at random.

    Whatever is leased is right for as long as it is leased (slots are poisoned when given up).
    """
    folder, tensors = checkpoint
    faults = random.Random(seed)
    probe = open_store(folder, slots_bytes=0)
    # Each thread waits while it holds one block at most, and that much must fit for all to go on.
    need = 6 * largest(probe.layouts)
    probe.close()
    bench = open_store(folder, slots_bytes=need + slots)
    bench.reader.fails = lambda number: faults.random() < fault_rate
    failures: list[BaseException] = []
    answered = threading.Semaphore(0)

    def work(number: int) -> None:
        r = random.Random(seed * 10 + number)
        try:
            for _ in range(25):
                outer, inner = r.choice(LEASABLE), r.choice(LEASABLE)
                if r.random() < 0.5:
                    bench.store.request(r.sample(LEASABLE, 4), r.choice(list(Priority)))
                try:
                    with bench.store.lease_each(r.sample(LEASABLE, 3)) as groups:
                        for group in groups:
                            for block, views in group[:2]:
                                assert_right(block, views, tensors)
                    with bench.store.lease(outer) as a:
                        assert_right(outer, a, tensors)
                        with bench.store.lease(inner) as b:
                            assert_right(inner, b, tensors)
                        assert_right(outer, a, tensors)
                    answered.release()
                except DiskReadError:
                    assert fault_rate > 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hung"
    assert not failures, failures
    assert answered.acquire(blocking=False)
    bench.close()


def test_a_failed_read_fails_one_lease_and_the_next_one_works(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = checkpoint
    bench = open_store(folder, slots_bytes=1 << 18)
    block = BlockId(1, BlockKind.EXPERT, 2)
    bench.reader.fails = lambda number: number == 1
    with pytest.raises(DiskReadError, match="injected"), bench.store.lease(block):
        pass
    with bench.store.lease(block) as views:
        assert_right(block, views, tensors)
    bench.close()


def test_lru_keeps_what_was_used_last(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = checkpoint
    experts = [BlockId(0, BlockKind.EXPERT, n) for n in range(EXPERTS)]
    size = open_store(folder, slots_bytes=0)
    slot = size.layouts[experts[0]].slot_bytes
    size.close()
    bench = open_store(folder, slots_bytes=2 * slot)
    for block in (experts[0], experts[1], experts[0], experts[2]):
        with bench.store.lease(block):
            pass
    assert bench.store.presence(experts[0]) is Presence.HIT
    assert bench.store.presence(experts[1]) is Presence.MISS
    assert list(bench.store._policy.eviction_order()) == [experts[0], experts[2]]
    bench.close()


def test_a_prefetch_never_takes_an_awaited_or_leased_slot(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = checkpoint
    experts = [BlockId(0, BlockKind.EXPERT, n) for n in range(EXPERTS)]
    size = open_store(folder, slots_bytes=0)
    slot = size.layouts[experts[0]].slot_bytes
    size.close()
    bench = open_store(folder, slots_bytes=2 * slot)
    with bench.store.lease(experts[0]) as held:
        bench.store.request([experts[1]], Priority.PREFETCH)
        bench.store.request([experts[2], experts[3]], Priority.SPECULATIVE)
        with bench.store.lease(experts[1]) as views:
            assert_right(experts[1], views, tensors)
        assert_right(experts[0], held, tensors)
    # The backlog begins as slots come free, and nobody has to ask again.
    with bench.store.lease(experts[2]) as views:
        assert_right(experts[2], views, tensors)
    bench.close()


def experts_of(layer: int) -> list[BlockId]:
    return [BlockId(layer, BlockKind.EXPERT, expert) for expert in range(EXPERTS)]


@pytest.mark.parametrize("slots", [1, 2, 3, 20])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("resident", [0, 5, 12])
def test_groups_hold_every_block_once_in_order(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], slots: int, ahead: bool, resident: int
) -> None:
    """However few slots there are: a group needs one."""
    folder, tensors = checkpoint
    blocks = [block for layer in range(LAYERS) for block in experts_of(layer)]
    homes = set(random.Random(resident).sample(blocks, resident))
    size = open_store(folder, slots_bytes=0)
    slot = size.layouts[blocks[0]].slot_bytes
    size.close()
    bench = open_store(folder, slots_bytes=slots * slot, resident=homes.__contains__)
    bench.store.load_residents()
    for _ in range(2):
        if ahead:
            bench.store.request(blocks, Priority.DEMAND)
        seen = []
        with bench.store.lease_each(blocks) as groups:
            for group in groups:
                assert group
                assert sum(block not in homes for block, _ in group) <= slots
                for block, views in group:
                    assert_right(block, views, tensors)  # poisoned where a slot was given up
                    seen.append(block)
        assert seen == blocks
        if resident == len(blocks) or slots >= len(blocks):
            with bench.store.lease_each(blocks) as groups:
                assert [len(group) for group in groups] == [len(blocks)]
    counters = bench.store.counters
    assert counters.hits + counters.pending + counters.misses >= 2 * (len(blocks) - resident)
    bench.close()  # asserts that nothing is leased


def test_a_group_holds_what_is_ready_and_nothing_while_it_waits(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, _ = checkpoint
    blocks = experts_of(0)
    bench = open_store(folder, slots_bytes=1 << 20)
    for block in (blocks[0], blocks[1], blocks[3]):
        with bench.store.lease(block):
            pass
    with bench.store.lease_each(blocks) as groups:
        assert [block for block, _ in next(groups)] == blocks[:2]
        assert [block for block, _ in next(groups)] == blocks[2:]
        assert next(groups, None) is None
    with bench.store.lease_each([]) as groups:
        assert list(groups) == []
    bench.close()


def test_reads_go_on_while_a_group_is_leased(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = checkpoint
    blocks = experts_of(0)
    bench = open_store(folder, slots_bytes=1 << 20)
    with bench.store.lease(blocks[0]):
        pass
    bench.store.request(blocks, Priority.DEMAND)
    with bench.store.lease_each(blocks) as groups:
        first = next(groups)
        assert first[0][0] == blocks[0]
        while bench.store.presence(blocks[3]) is not Presence.HIT:
            pass  # without another call to the store
        for group in (first, *groups):
            for block, views in group if group is not first else []:
                assert_right(block, views, tensors)
    bench.close()


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_a_read_that_fails_between_groups_leaves_nothing_leased(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], slots: int
) -> None:
    folder, tensors = checkpoint
    blocks = experts_of(1)
    size = open_store(folder, slots_bytes=0)
    slot = size.layouts[blocks[0]].slot_bytes
    size.close()
    for failing in range(1, 14):
        bench = open_store(folder, slots_bytes=slots * slot)
        bench.reader.fails = lambda number, failing=failing: number == failing
        seen = 0
        try:
            with bench.store.lease_each(blocks) as groups:
                for group in groups:
                    for block, views in group:
                        assert_right(block, views, tensors)
                    seen += len(group)
            assert bench.reader.reads < failing
        except DiskReadError:
            assert seen < len(blocks)
        with bench.store.lease_each(blocks) as groups:
            for group in groups:
                for block, views in group:
                    assert_right(block, views, tensors)
        bench.close()


def test_an_error_of_the_caller_releases_the_group(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    bench = open_store(checkpoint[0], slots_bytes=1 << 20)
    with pytest.raises(ZeroDivisionError), bench.store.lease_each(experts_of(0)) as groups:
        next(groups)
        raise ZeroDivisionError
    with pytest.raises(KeyError), bench.store.lease_each([BlockId(99, BlockKind.EXPERT)]) as groups:
        next(groups)
    bench.close()


def test_a_block_larger_than_the_slots_is_an_error(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    bench = open_store(checkpoint[0], slots_bytes=4096)
    with pytest.raises(BudgetError, match="the slots have"), bench.store.lease(LEASABLE[2]):
        pass
    bench.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("home", ["disk", "host", "mixed"])
def test_rows_equal_the_table(tmp_path: Path, tied: bool, dtype: torch.dtype, home: str) -> None:
    tensors = write_checkpoint(tmp_path, dtype, tied)
    resident = {
        "disk": lambda block: False,
        "host": lambda block: True,
        "mixed": lambda block: block.kind is BlockKind.HEAD and block.index < CHUNKS - 1,
    }[home]
    bench = open_store(tmp_path, slots_bytes=1 << 17, resident=resident, tied=tied)
    bench.store.load_residents()
    for ids in ([0], [VOCABULARY - 1, 0, 5, 5, 0], list(range(VOCABULARY))):
        index = torch.tensor(ids)
        rows = bench.store.rows(EMBEDDING, "weight", index)
        assert torch.equal(rows, tensors["embed.weight"][index])
    if home == "host":
        assert (bench.layouts[EMBEDDING].slot_bytes == 0) == tied, "a tied table takes no memory"
    bench.close()


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16:64"])
def test_converted_blocks_are_the_same_however_often_they_are_read(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], scheme: str, spill: bool
) -> None:
    folder, tensors = checkpoint
    bench = open_store(folder, slots_bytes=1 << 16, scheme=scheme, spill=spill)
    seen: dict[tuple[BlockId, str], torch.Tensor] = {}
    for _ in range(3):
        for block in LEASABLE:
            with bench.store.lease(block) as views:
                for param in SPECS[block].params:
                    values = (
                        ops.dequantize(views[param.name], torch.float32)
                        if len(param.shape) > 1
                        else None
                    )
                    if values is None:
                        continue
                    first = seen.setdefault((block, param.name), values.clone())
                    assert torch.equal(first, values)
                    source = tensors[param.sources[0]].float()
                    source = source[slice(*param.rows)] if param.rows else source
                    assert (values - source).square().mean() < 0.02
    bench.close()


def test_nan_is_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["1.2.down"][3, 5] = float("nan")

    write_checkpoint(tmp_path, change=spoil)
    for scheme in ("none", "w4a16"):
        bench = open_store(tmp_path, slots_bytes=1 << 18, scheme=scheme)
        with (
            pytest.raises(NumericsError, match=r"1\.2\.down of layer 1 expert 2"),
            bench.store.lease(BlockId(1, BlockKind.EXPERT, 2)),
        ):
            pass
        bench.close()


def test_close_frees_everything_after_residents_failed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    bench = open_store(tmp_path, slots_bytes=1 << 17, resident=lambda block: block.layer < LAYERS)
    bench.reader.fails = lambda number: number >= 9
    with pytest.raises(DiskReadError):
        bench.store.load_residents()
    bench.close()
