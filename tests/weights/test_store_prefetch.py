"""Guesses: dropped when they are stale, and never in the way of what is sure."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doubles import EXPERTS, Bench, block_specs, open_store, write_checkpoint

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.store import Presence, Priority
from hmt.memory import PreadReader

SPECS = {block.id: block for block in block_specs()}
EXPERT = [BlockId(layer, BlockKind.EXPERT, n) for layer in (0, 1) for n in range(EXPERTS)]


class Gate(PreadReader):
    """Reads only while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.began = threading.Semaphore(0)
        self.read: list[int] = []

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        self.read.append(offset)
        self.began.release()
        assert self.open.wait(20)
        return super().read_into(path, offset, view)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder)


class Guessed:
    """A store with room for `slots` experts whose only thread is held at the gate."""

    def __init__(self, checkpoint: tuple[Path, dict[str, torch.Tensor]], slots: int) -> None:
        folder, self.tensors = checkpoint
        size = open_store(folder, slots_bytes=0)
        slot = max(size.layouts[block].slot_bytes for block in EXPERT)
        size.close()
        self.gate = Gate()
        self.bench: Bench = open_store(
            folder, slots_bytes=slots * slot, threads=1, reader=self.gate
        )
        self.store = self.bench.store

    def guess(self, *blocks: BlockId) -> None:
        self.store.request(blocks, Priority.SPECULATIVE)

    def states(self, *blocks: BlockId) -> list[Presence]:
        return [self.store.presence(block) for block in blocks]

    def check(self, block: BlockId) -> None:
        with self.store.lease(block) as views:
            for param in SPECS[block].params:
                assert torch.equal(views[param.name].data, self.tensors[param.sources[0]])


@pytest.fixture
def three(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> Iterator[Guessed]:
    guessed = Guessed(checkpoint, 3)
    yield guessed
    guessed.gate.open.set()
    guessed.bench.close()
    assert not guessed.store._expected.held


def test_what_is_no_longer_guessed_is_dropped(three: Guessed) -> None:
    three.guess(*EXPERT[:3])
    assert three.gate.began.acquire(timeout=20)
    three.guess(EXPERT[2], EXPERT[3])
    # The first one is being read; it has to end, and then gives its memory to the next.
    assert three.states(*EXPERT[:4]) == [
        Presence.PENDING,
        Presence.MISS,
        Presence.PENDING,
        Presence.PENDING,
    ]
    three.gate.open.set()
    for block in EXPERT[:4]:
        three.check(block)
    assert three.store.disk_counters().by_priority[Priority.SPECULATIVE].cancelled == 2


def test_what_is_sure_takes_the_memory_of_guesses_that_have_not_begun(three: Guessed) -> None:
    three.guess(*EXPERT[:3])
    assert three.gate.began.acquire(timeout=20)
    three.store.request(EXPERT[4:6], Priority.PREFETCH)
    assert three.states(*EXPERT[1:3], *EXPERT[4:6]) == [Presence.MISS] * 2 + [Presence.PENDING] * 2
    three.gate.open.set()
    for block in EXPERT[4:6]:
        three.check(block)


def test_probable_experts_that_nobody_has_chosen_need_not_stay(three: Guessed) -> None:
    three.gate.open.set()
    three.store.request(EXPERT[:5], Priority.PREFETCH)  # two more than there is room for
    three.store.request([EXPERT[1]], Priority.DEMAND)
    three.check(EXPERT[1])
    # Of the next layer others are probable: what was not chosen makes room for them.
    three.store.request([EXPERT[2], *EXPERT[5:7]], Priority.PREFETCH)
    for block in EXPERT[5:7]:
        three.check(block)
    assert three.states(EXPERT[2]) != [Presence.MISS], "this one is still wanted"
    three.store.request((), Priority.PREFETCH)
    assert not three.store._expected.held
    for block in EXPERT[:3]:  # and nothing is held for ever
        three.check(block)


def test_a_lease_takes_the_memory_of_guesses_and_may_take_a_guess_itself(three: Guessed) -> None:
    three.guess(*EXPERT[:3])
    assert three.gate.began.acquire(timeout=20)
    waiting = [threading.Thread(target=three.check, args=(EXPERT[n],)) for n in (1, 5)]
    for thread in waiting:
        thread.start()
    while three.store.presence(EXPERT[5]) is not Presence.PENDING:
        pass  # until the lease has begun to read
    assert three.store.presence(EXPERT[1]) is Presence.PENDING, "somebody waits for it now"
    three.gate.open.set()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert three.store.disk_counters().by_priority[Priority.DEMAND].failed == 0


def test_a_failed_step_drops_its_guesses(three: Guessed) -> None:
    three.guess(*EXPERT[:3])
    assert three.gate.began.acquire(timeout=20)
    three.store.abandon()
    assert three.states(*EXPERT[1:3]) == [Presence.MISS] * 2
    three.gate.open.set()
    for block in EXPERT[:3]:
        three.check(block)


def test_a_guess_of_several_stages_ends_between_them(
    checkpoint: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """Conversions read one parameter after the other."""
    gate = Gate()
    bench = open_store(checkpoint[0], slots_bytes=1 << 18, scheme="w8a8", threads=1, reader=gate)
    bench.store.request(EXPERT[:1], Priority.SPECULATIVE)
    assert gate.began.acquire(timeout=20)
    bench.store.request([], Priority.SPECULATIVE)
    gate.open.set()
    while bench.store.presence(EXPERT[0]) is not Presence.MISS:
        pass
    reads = len(gate.read)
    with bench.store.lease(EXPERT[0]):
        pass
    assert len(gate.read) > 2 * reads, "the rest was not read before"
    bench.close()
