"""What drafts may fail: requests go on as without it, and the summary says so."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_oracle import OpenGate
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import BudgetError, DiskReadError, HMTError
from hmt.contracts.plan import Tier
from hmt.engine.loading import disk
from hmt.engine.speculation.draft_model import DraftModel
from hmt.kernels.cpu import extension
from hmt.memory import PreadReader

pytestmark = pytest.mark.each_once

OPTIONS: dict[str, Any] = {"host_memory": "320MiB", "max_prefill_tokens": 64, "context": 512}
REQUESTS = [
    hmt.Request([20 + (11 * n) % 180 for n in range(30)], 40, ignore_eos=True),
    hmt.Request("Tell a story.", 40, sampling=hmt.Sampling(temperature=1.0, seed=3)),
]
WAYS = {"draft": (MINI_DENSE, f"draft={MINI_DENSE}"), "mtp": (MINI_MOE, "mtp")}


@pytest.mark.skipif(extension.load() is None, reason="nothing is drafted then")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_fault_stops_who_drafts_and_nothing_else(
    way: str, call: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first token of a draft, within one, and later; in a batch."""
    path, speculate = WAYS[way]
    with hmt.Engine(**OPTIONS, speculate="off") as engine:
        model = engine.load_model(path)
        wanted = [model.infer(one).token_ids for one in REQUESTS]
    error: HMTError = DiskReadError("injected: the disk") if call % 2 else BudgetError("injected")
    with hmt.Engine(**OPTIONS, speculate=speculate) as engine:
        model = engine.load_model(path)
        assert model._core.memory.draft is not None
        used = model._core.memory.draft.memory.kv.allocator
        free, calls, feed = used.free_tokens, 0, DraftModel.feed

        def fails(self: DraftModel, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise error
            return feed(self, *arguments)

        monkeypatch.setattr(DraftModel, "feed", fails)
        with caplog.at_level(logging.WARNING, "hmt"):
            streams = [model.stream(one) for one in REQUESTS]
            assert [stream.completion().token_ids for stream in streams] == wanted
            assert model.infer(REQUESTS[0]).token_ids == wanted[0]
        assert calls == call, "it was asked again"
        [said] = [one for one in caplog.records if "what drafted tokens failed" in one.message]
        assert "injected" in said.message
        summary = model.summary()
        assert summary.speculation.failures == 1
        assert any("injected" in note for note in summary.notes)
        assert used.free_tokens == free, "its sequences were closed"
        model.reset_summary()
        again = model.summary()
        assert not again.speculation.failures and again.notes == summary.notes


class Drive(PreadReader):
    """Fails for files of a folder once it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.fails, self.failed = folder, False, 0

    def read_vector(self, path: Path, offset: int, views: Any) -> int:
        if self.fails and self.folder in path.parents:
            self.failed += 1
            raise DiskReadError(f"injected: {path} at {offset}")
        return super().read_vector(path, offset, views)


@pytest.mark.skipif(extension.load() is None, reason="nothing is drafted then")
def test_a_draft_model_whose_disk_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on the disk in part; so does the model that verifies, whose disk stays."""
    folder = Path(shutil.copytree(MINI_DENSE, tmp_path / "draft"))
    drive = Drive(folder)
    monkeypatch.setattr(disk, "open_reader", lambda kind: drive)
    options = OPTIONS | {"host_memory": "24MiB", "max_batch": 2}
    with hmt.Engine(**options, speculate="off") as engine:
        wanted = engine.load_model(MINI_DENSE).infer(REQUESTS[0]).token_ids
    with hmt.Engine(**options, speculate=f"draft={folder}") as engine:
        model = engine.load_model(MINI_DENSE)
        draft = model._core.memory.draft
        assert draft is not None and draft.prepared.plan.blocks_in(Tier.DISK)
        model._core.speculator._gate = OpenGate()

        def answer(salt: str) -> tuple[int, ...]:
            """That no other request helped with."""
            return tuple(model.infer(replace(REQUESTS[0], cache_salt=salt)).token_ids)

        assert answer("a") == tuple(wanted)
        assert not model.summary().speculation.failures
        drive.fails = True
        assert answer("b") == tuple(wanted)
        failed = drive.failed
        assert failed and model.summary().speculation.failures == 1
        assert answer("c") == tuple(wanted)
        assert drive.failed == failed, "it was read again"
