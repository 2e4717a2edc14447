"""Ranks that torchrun has started: what it sets in the environment, and processes that come."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hmt
from hmt.base.errors import ConfigError, MachineError, RankError
from hmt.cli.options import EngineOptions, embedded_model
from hmt.engine.ranks.torchrun import Launch

pytestmark = pytest.mark.usefixtures("quick_processes")

OPTIONS: dict[str, Any] = {"host_memory": "96MiB", "context": 2048, "threads": 1}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """This process is the first of two that torchrun started."""
    told = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "RANK": "0", "MASTER_PORT": f"test-{os.getpid()}"}  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    launch = Launch.of_this_process()
    assert launch is not None
    yield launch
    assert not launch.folder.exists()


def second() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "hmt", "run", "Hi"]
    return subprocess.Popen(command, env=os.environ | {"RANK": "1"})


def test_processes_of_torchrun_compute_a_model_together(launched: Launch) -> None:
    """And one that ends fails what runs."""
    request = hmt.Request([{"role": "user", "content": "What is 12 + 30?"}], 4)
    options = EngineOptions(**OPTIONS).arguments()
    assert options["tp"] == 2, "they divide the layers, where nothing else is asked"
    with second() as other, hmt.Engine(**options) as engine:
        model = engine.load_model(embedded_model())
        assert model.infer(request).text.strip() == "42"
        (rank,) = model.ranks
        assert (rank.pid, rank.alive) == (other.pid, True)
        stream = model.stream(hmt.Request("Tell me", 2000, ignore_eos=True))
        next(iter(stream))
        other.send_signal(signal.SIGTERM)  # as torchrun sends it to all: the first one ends them
        next(iter(stream))
        os.kill(rank.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankError, match="rank 1"):
            list(stream)
        assert time.monotonic() - killed < 10
        assert not model.ranks[0].alive


def test_what_torchrun_started_has_to_be_what_was_asked_for(
    launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EngineOptions(pp=2).arguments()["pp"] == 2
    with pytest.raises(ConfigError, match="started 2 processes, and 6 were asked for"):
        EngineOptions(tp=3, pp=2).arguments()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="--nnodes 1"):
        EngineOptions().arguments()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.of_this_process() is None


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(MachineError, match="this user alone"):
        Launch(0, 2, folder).wait_for_others()
