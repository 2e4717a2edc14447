"""Hundreds of random schedules of a failing disk: nothing hangs, nothing leaks, nothing lies."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from default_part import rounds
from doubles import Bench, block_specs, open_store, write_checkpoint
from faulty_disk import Faults, FaultyPread, FaultyUring

from hmt.base.errors import DiskReadError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.plan import Tier
from hmt.contracts.store import Priority
from hmt.memory.disk.uring import unavailable
from hmt.weights import BlockLayout

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = 300  # for each kind of disk
SPECS = {block.id: block for block in block_specs()}
LEASABLE = [block for block in SPECS if block.kind is not BlockKind.EMBEDDING]
EMBEDDING = BlockId(TRUNK, BlockKind.EMBEDDING)
DRIVES = {"direct": FaultyPread, "io_uring": FaultyUring}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder)


@pytest.fixture(params=DRIVES)
def drive(request: pytest.FixtureRequest) -> type:
    if request.param == "io_uring" and unavailable() is not None:
        pytest.skip("no io_uring here")
    return DRIVES[request.param]


class Schedule:
    """One store and one list of things that are asked of it."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor], seed: int, kind: type):
        self.dice = random.Random(seed)
        rates = [self.dice.choice([0.0, 0.05, 0.3]) for _ in range(3)]
        self.faults = Faults(seed, *rates, stall_s=self.dice.choice([1e-5, 2e-4]))
        self.tensors = tensors
        self.answers = 0
        self.failures = 0
        # One or a few of the largest blocks: 12 to 17 pages.
        slots = self.dice.choice([18, 30, 60, 150]) * 4096
        self.bench: Bench = open_store(
            folder, slots_bytes=slots, threads=self.dice.randint(1, 4), reader=kind(self.faults)
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            what = self.dice.random()
            if what < 0.35:
                blocks = self.dice.sample(LEASABLE, self.dice.randint(0, 5))
                self.bench.store.request(
                    blocks, self.dice.choice([Priority.PREFETCH, Priority.SPECULATIVE])
                )
            elif what < 0.45:
                self.bench.store.abandon()
            elif what < 0.55:
                self.rows()
            elif what < 0.75:
                self.lease_each(self.dice.sample(LEASABLE, self.dice.randint(1, 4)))
            else:
                self.lease(self.dice.choice(LEASABLE))

    def lease(self, block: BlockId) -> None:
        try:
            with self.bench.store.lease(block) as views:
                self.check(block, views)
        except DiskReadError as error:
            self.blame([block], error)

    def lease_each(self, blocks: list[BlockId]) -> None:
        try:
            with self.bench.store.lease_each(blocks) as groups:
                for group in groups:
                    for block, views in group:
                        self.check(block, views)
        except DiskReadError as error:
            self.blame(blocks, error)

    def rows(self) -> None:
        ids = torch.tensor([self.dice.randrange(96) for _ in range(self.dice.randint(1, 5))])
        try:
            rows = self.bench.store.rows(EMBEDDING, "weight", ids)
        except DiskReadError as error:
            self.failures += 1
            assert str(error)
            return
        assert torch.equal(rows, self.tensors["embed.weight"][ids])
        self.answers += 1

    def check(self, block: BlockId, views: object) -> None:
        for param in SPECS[block].params:
            expected = self.tensors[param.sources[0]]
            expected = expected[slice(*param.rows)] if param.rows is not None else expected
            assert torch.equal(views[param.name].data, expected)  # type: ignore[index]
        self.answers += 1

    def blame(self, blocks: list[BlockId], error: DiskReadError) -> None:
        """A lease fails only for a read of its own that went wrong, and says for which."""
        self.failures += 1
        ranges = [r for block in blocks for r in ranges_of(self.bench.layouts[block])]
        assert any(
            path == other and first < last and begin < end
            for path, first, end in self.faults.harmed
            for other, begin, last in ranges
        ), "none of its reads went wrong"
        named = re.search(r" at (\d+)", str(error))
        assert named is not None
        assert any(begin <= int(named[1]) < end for _, begin, end in ranges), error

    def close(self) -> None:
        """With the disk mended, everything can be read; then nothing is left."""
        self.faults.errors = self.faults.short = self.faults.late = 0.0
        for block in self.dice.sample(LEASABLE, 2):
            # A read that went wrong before, with others of its block still running, may be what a
            # lease hears of; the next one reads anew.
            before = self.failures
            self.lease(block)
            if self.failures > before:
                self.lease(block)
                assert self.failures == before + 1
        self.bench.close()  # asserts that the ledger is empty
        assert self.bench.ledger.used_bytes(Tier.HOST) == 0
        expected = self.bench.store._expected
        assert not expected.held and not expected.urgent_reads
        assert not list(self.bench.store._policy.eviction_order())


def ranges_of(layout: BlockLayout) -> Iterator[tuple[Path, int, int]]:
    for read in layout.reads:
        yield read.file.path, read.file.offset, read.file.offset + read.file.nbytes


def test_random_fault_schedules(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], drive: type
) -> None:
    answers = failures = 0
    count = rounds(SCHEDULES)
    for seed in range(count):
        schedule = Schedule(*checkpoint, seed, drive)
        schedule.run(6)
        schedule.close()
        answers += schedule.answers
        failures += schedule.failures
    assert answers > 2 * count and failures > count // 4, "both were seen"
