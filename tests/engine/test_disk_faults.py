"""A model over a disk that fails, falls short and stalls: logits are right, or there are none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import DiskReadError
from hmt.contracts.plan import Tier
from hmt.engine.loading import disk
from hmt.memory import PreadReader

TOKENS = [5, 80, 1200, 33, 7]


class Drive(PreadReader):
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.share = 0.0

    def read_vector(self, path: Path, offset: int, views: Any) -> int:
        self.seed = (self.seed * 6364136223846793005 + 1442695040888963407) % 2**64
        dice = (self.seed >> 33) / 2**31
        if dice < self.share / 2:
            raise DiskReadError(f"injected: {path} at {offset}")
        got = super().read_vector(path, offset, views)
        return got // 8192 * 4096 if dice < self.share else got


@pytest.fixture(params=[(MINI_DENSE, "6MiB", "overlapped"), (MINI_DENSE, "6MiB", "plain"),
                        (MINI_MOE, "10MiB", "overlapped")])  # fmt: skip
def model(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[hmt.engine.LoadedModel, Drive]]:
    path, budget, executor = request.param
    drive = Drive()
    monkeypatch.setattr(disk, "open_reader", lambda kind: drive)
    with hmt.Engine(host_memory=budget, context=64, executor=executor, max_batch=1) as engine:
        loaded = engine.load_model(path)
        assert loaded.plan.homes and Tier.DISK in loaded.plan.homes.values()
        yield loaded, drive
        drive.share = 0.0
    assert engine._ledger.reserved_bytes(Tier.HOST) == 0


def test_logits_are_right_or_there_are_none(
    model: tuple[hmt.engine.LoadedModel, Drive],
) -> None:
    loaded, drive = model
    rows = list(range(len(TOKENS)))
    expected = loaded.logits(TOKENS, rows, prefill=3)
    answers = 0
    for seed in range(40):
        drive.seed, drive.share = seed * 7919, [0.0, 0.002, 0.01, 0.3][seed % 4]
        try:
            logits = loaded.logits(TOKENS, rows, prefill=3)
        except DiskReadError:
            assert drive.share
            continue
        assert torch.equal(logits, expected)
        answers += 1
    assert 10 <= answers < 40
    drive.share = 0.0
    assert torch.equal(loaded.logits(TOKENS, rows, prefill=3), expected)
    assert loaded._core.scheduler.idle
