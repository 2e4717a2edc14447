"""Slots by counts: a circle of blocks of several sizes never cuts up the memory."""

import random
from pathlib import Path

import pytest
from doubles import block_specs, open_store, write_checkpoint

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.store import Priority

CIRCLE = [
    block.id
    for block in block_specs()
    if block.id.kind not in (BlockKind.EMBEDDING, BlockKind.EXPERT)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


def counts_of(sizes: dict[BlockId, int], most: int) -> dict[int, int]:
    each = list(sizes.values())
    return {size: min(most, each.count(size)) for size in set(each)}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_circle_takes_each_place_from_its_own_size(checkpoint: Path, most: int) -> None:
    probe = open_store(checkpoint, slots_bytes=1 << 20)
    sizes = {block: probe.layouts[block].slot_bytes for block in CIRCLE}
    probe.close()
    assert len(set(sizes.values())) > 1
    counts = counts_of(sizes, most)
    room = sum(size * count for size, count in counts.items())
    bench = open_store(checkpoint, slots_bytes=room, slot_counts=counts, poison=False)
    slots = next(pool for pool in bench.pools if pool.account.purpose == "slots")
    rng = random.Random(most)
    for turn in range(200):
        at = turn % len(CIRCLE)
        ahead = [CIRCLE[(at + n) % len(CIRCLE)] for n in range(rng.randint(0, 4))]
        bench.store.request(ahead, Priority.PREFETCH)
        with bench.store.lease(CIRCLE[at]):
            held = [b for b in CIRCLE if bench.store.presence(b).name != "MISS"]
            for size, count in counts.items():
                assert sum(sizes[block] == size for block in held) <= count
    stats = slots.stats()
    assert stats.moves == 0 and stats.arenas == 1 and stats.backed_bytes <= room
    bench.close()


def test_a_block_waits_for_its_own_size_though_there_is_other_room(checkpoint: Path) -> None:
    probe = open_store(checkpoint, slots_bytes=1 << 20)
    sizes = {block: probe.layouts[block].slot_bytes for block in CIRCLE}
    probe.close()
    size = max(sizes.values(), key=list(sizes.values()).count)
    first, second, *_ = [block for block in CIRCLE if sizes[block] == size]
    counts = counts_of(sizes, 1)
    bench = open_store(
        checkpoint, slots_bytes=2 * sum(s * n for s, n in counts.items()), slot_counts=counts
    )
    with bench.store.lease(first):
        bench.store.request([second], Priority.PREFETCH)
        assert bench.store.presence(second).name == "MISS", "the only place is leased"
    with bench.store.lease(second):
        assert bench.store.presence(first).name == "MISS"
    bench.close()


def test_a_block_without_a_size_of_its_own_takes_a_larger_place(checkpoint: Path) -> None:
    probe = open_store(checkpoint, slots_bytes=1 << 20)
    sizes = {block: probe.layouts[block].slot_bytes for block in CIRCLE}
    probe.close()
    least, *larger = sorted(set(sizes.values()))
    counts = dict.fromkeys(larger, 1)
    bench = open_store(checkpoint, slots_bytes=sum(larger), slot_counts=counts, poison=False)
    rng = random.Random(1)
    for turn in range(200):
        at = turn % len(CIRCLE)
        ahead = [CIRCLE[(at + n) % len(CIRCLE)] for n in range(rng.randint(0, 4))]
        bench.store.request(ahead, Priority.PREFETCH)
        with bench.store.lease(CIRCLE[at]) as views:
            assert views
            held = [sizes[b] for b in CIRCLE if bench.store.presence(b).name != "MISS"]
            assert len(held) <= len(larger)
            assert sum(size in (least, larger[0]) for size in held) <= 1, "they share one place"
    slots = next(pool for pool in bench.pools if pool.account.purpose == "slots")
    assert slots.stats().moves == 0 and slots.stats().backed_bytes <= sum(larger)
    bench.close()
