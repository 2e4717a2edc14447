"""Reads on a guess: never before a need, kept until they are forgotten, and counted once."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from doubles import EXPERTS, LAYERS, Bench, open_store, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.base.errors import DiskReadError
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.store import Presence, Priority

BLOCKS = [BlockId(la, BlockKind.EXPERT, e) for la in range(LAYERS) for e in range(EXPERTS)]
A, B, C, D = BLOCKS[:4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


class Gate:
    """Holds reads back until it is opened, then lets as many through as it is told to."""

    def __init__(self, bench: Bench) -> None:
        self.passes = threading.Semaphore(0)
        self.open = False
        inner = bench.reader.read_into

        def read_into(path: Path, offset: int, view: memoryview) -> int:
            if not self.open:
                self.passes.acquire()
            return inner(path, offset, view)

        bench.reader.read_into = read_into  # type: ignore[method-assign]

    def let_all_pass(self) -> None:
        self.open = True
        self.passes.release(1000)


Opened = Callable[[int], tuple[Bench, Gate]]


@pytest.fixture
def opened(folder: Path) -> Iterator[Opened]:
    """A store with so many slots for experts, whose reads wait at a gate."""
    benches: list[tuple[Bench, Gate]] = []

    def make(slots: int) -> tuple[Bench, Gate]:
        probe = open_store(folder, slots_bytes=0)
        slot = probe.layouts[A].slot_bytes
        probe.close()
        bench = open_store(folder, slots_bytes=slots * slot)
        benches.append((bench, Gate(bench)))
        return benches[-1]

    yield make
    for bench, gate in benches:
        gate.let_all_pass()
        bench.close()


def arrived(bench: Bench, *blocks: BlockId) -> None:
    while any(bench.store.presence(block) is not Presence.HIT for block in blocks):
        pass


def use(bench: Bench, *blocks: BlockId) -> None:
    for block in blocks:
        with bench.store.lease(block):
            pass


def test_a_guess_waits_until_no_need_is_read(opened: Opened) -> None:
    bench, gate = opened(4)
    bench.store.request([A], Priority.DEMAND)
    bench.store.request([B], Priority.SPECULATIVE)
    assert bench.store.presence(A) is Presence.PENDING
    assert bench.store.presence(B) is Presence.MISS
    gate.let_all_pass()
    arrived(bench, A, B)
    assert bench.store.prefetch_counters.begun == 1


def test_a_guess_that_becomes_a_need_holds_back_other_guesses(opened: Opened) -> None:
    bench, gate = opened(4)
    bench.store.request([A], Priority.SPECULATIVE)
    bench.store.request([A], Priority.DEMAND)
    bench.store.request([B], Priority.SPECULATIVE)
    assert bench.store.presence(B) is Presence.MISS
    gate.let_all_pass()
    arrived(bench, A, B)


def test_guesses_are_counted_in_time_late_or_not_at_all(opened: Opened) -> None:
    bench, gate = opened(4)
    size = bench.layouts[A].read_bytes
    counters = bench.store.prefetch_counters
    bench.store.request([A, B, C], Priority.SPECULATIVE)
    assert (counters.begun, counters.unneeded_bytes) == (3, 3 * size)
    bench.store.request([A], Priority.DEMAND)  # while it is being read
    assert (counters.in_time, counters.late, counters.unneeded_bytes) == (0, 1, 2 * size)
    gate.let_all_pass()
    arrived(bench, A, B, C)
    use(bench, A, B, A, B)
    assert (counters.in_time, counters.late, counters.unneeded_bytes) == (1, 1, size)
    bench.store.request([], Priority.SPECULATIVE)
    use(bench, *BLOCKS[4:])  # C goes, and is needed later: the guess did not help
    use(bench, C)
    assert (counters.in_time, counters.late, counters.unneeded_bytes) == (1, 1, size)


def test_guesses_do_not_push_each_other_out_but_make_way_for_all_else(opened: Opened) -> None:
    bench, gate = opened(3)
    gate.let_all_pass()
    use(bench, A, B)
    bench.store.request([C, D], Priority.SPECULATIVE)
    arrived(bench, C, D)
    assert bench.store.presence(B) is Presence.HIT, "the coldest made room"
    bench.store.request([C, D, BLOCKS[4], BLOCKS[5]], Priority.SPECULATIVE)
    arrived(bench, BLOCKS[4])
    assert [bench.store.presence(b) for b in (C, D, BLOCKS[5])] == [
        Presence.HIT,
        Presence.HIT,
        Presence.MISS,
    ]
    bench.store.request([A, B], Priority.DEMAND)
    use(bench, A, B)  # with nothing but guesses in the slots


def test_a_guess_does_not_take_the_slot_of_what_is_awaited(opened: Opened) -> None:
    bench, gate = opened(2)
    gate.let_all_pass()
    bench.store.request([A, B], Priority.PREFETCH)
    arrived(bench, A, B)
    bench.store.request([C], Priority.SPECULATIVE)
    assert bench.store.presence(C) is Presence.MISS
    use(bench, A, B)
    arrived(bench, C)


def test_what_is_no_longer_guessed_goes_first(opened: Opened) -> None:
    bench, gate = opened(3)
    gate.let_all_pass()
    use(bench, A, B)
    bench.store.request([C], Priority.SPECULATIVE)
    arrived(bench, C)
    bench.store.request([], Priority.SPECULATIVE)
    use(bench, D)
    assert bench.store.presence(C) is Presence.MISS
    assert bench.store.presence(A) is bench.store.presence(B) is Presence.HIT


def test_a_guess_that_fails_troubles_nobody(opened: Opened) -> None:
    bench, gate = opened(4)
    bench.reader.fails = lambda number: number == 1
    bench.store.request([A], Priority.SPECULATIVE)
    gate.let_all_pass()
    while bench.store.presence(A) is not Presence.MISS:
        pass
    use(bench, A)
    assert (bench.store.prefetch_counters.in_time, bench.store.prefetch_counters.late) == (0, 0)


def test_an_abandoned_step_leaves_no_guess_behind(opened: Opened) -> None:
    bench, gate = opened(2)
    gate.let_all_pass()
    bench.store.request([A, B], Priority.SPECULATIVE)
    arrived(bench, A, B)
    bench.store.abandon()
    bench.store.request([C, D], Priority.SPECULATIVE)
    arrived(bench, C, D)


@given(
    seed=st.integers(0, 2**31),
    slots=st.integers(1, 6),
    fault_rate=st.sampled_from([0.0, 0.0, 0.1]),
)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_guesses_change_no_answer(
    folder: Path, seed: int, slots: int, fault_rate: float
) -> None:
    """Leases, needs and guesses at random: nothing hangs, leaks or is counted twice."""
    import random

    r = random.Random(seed)
    probe = open_store(folder, slots_bytes=0)
    slot = probe.layouts[A].slot_bytes
    probe.close()
    bench = open_store(folder, slots_bytes=slots * slot)
    bench.reader.fails = lambda number: r.random() < fault_rate
    counters = bench.store.prefetch_counters
    for _ in range(60):
        what = r.random()
        wanted = r.sample(BLOCKS, r.randint(0, 4))
        try:
            if what < 0.4:
                bench.store.request(wanted, Priority.SPECULATIVE)
            elif what < 0.6:
                bench.store.request(wanted, r.choice([Priority.DEMAND, Priority.PREFETCH]))
            elif what < 0.65:
                bench.store.abandon()
            else:
                with bench.store.lease_each(sorted(wanted)) as groups:
                    for group in groups:
                        for _, views in group:
                            assert torch.isfinite(views["up"].data).all()
        except DiskReadError:
            assert fault_rate
        assert counters.in_time + counters.late <= counters.begun
        assert counters.unneeded_bytes >= 0
    bench.close()
    expected = bench.store._expected
    assert expected.urgent_reads == 0
