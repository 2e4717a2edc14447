"""Processes under a limit, and what is made of their lines."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hmt.base.errors import MachineError
from hmt.base.units import MIB
from hmt.cli.options import embedded_model
from hmt_bench.bigger_than_ram import (
    PROCESS_BYTES,
    Competitor,
    Run,
    competitors,
    read_run,
    result,
    run_once,
)
from hmt_bench.cgroup_run import WatchedRun, forget_pages, memory_group, run_in_cgroup

ENOUGH = 256 * MIB
PYTHON = [sys.executable, "-c"]


@pytest.fixture
def limits() -> Iterator[None]:
    try:
        with memory_group(ENOUGH):
            pass
    except MachineError as error:
        pytest.skip(f"no memory limits here: {error}")
    yield


def run_python(code: str, limit: int = ENOUGH, timeout: float = 60) -> WatchedRun:
    return run_in_cgroup([*PYTHON, code], limit, timeout, os.environ)


def test_lines_come_with_their_time_and_the_peak_is_the_programs_own(limits: None) -> None:
    code = "import time; print('a', flush=True); x = b'1' * (50 << 20); time.sleep(.3); print('b')"
    watched = run_python(code)
    (first, a), (second, b) = watched.lines
    assert (a, b, watched.returncode) == ("a", "b", 0)
    assert 0 < first < second - 0.2
    assert 50 * MIB < watched.rss_bytes < 150 * MIB
    assert watched.group_bytes <= ENOUGH


def test_the_limit_is_hard(limits: None) -> None:
    code = (
        "print('begun', flush=True)\nx = bytearray(1 << 30)\nx[::4096] = x[::4096]\nprint('had it')"
    )
    watched = run_python(code)
    assert [line for _, line in watched.lines] == ["begun"]
    assert watched.returncode not in (0, None)
    assert watched.group_bytes <= ENOUGH


def test_a_program_that_takes_too_long_is_stopped_with_its_children(limits: None) -> None:
    code = (
        "import subprocess, sys, time; print('begun', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    watched = run_python(code, timeout=1)
    assert [line for _, line in watched.lines] == ["begun"]
    assert watched.returncode is None


def test_pages_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"x" * MIB)
    forget_pages(tmp_path)
    assert (tmp_path / "below" / "file").read_bytes() == b"x" * MIB


def test_hmt_decodes_in_a_process_of_its_own(limits: None, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model(), model)
    options = {"host_memory": 4 * MIB, "context": 64, "max_prefill_tokens": 16, "threads": 1}
    rival = Competitor("hmt", "hmt", model, 2, options)
    found = run_once(rival, 2 * PROCESS_BYTES, 3, 120)
    assert found.failure == "" and found.finished and found.steps == 3
    assert found.account["disk_bytes"] > 0 and found.account["used_bytes"] <= 4 * MIB
    summed = result(rival, [replace(found, disk_read_rate=1e9)], 120)
    assert summed.tokens_per_s == pytest.approx(2 / found.step_s)
    assert summed.read_share == pytest.approx(summed.disk_rate / 1e9)
    assert 0 <= summed.waiting_share <= 1 and summed.at_most_tokens_per_s is None
    assert summed.busy_share >= summed.read_share
    assert 0 < summed.table_share < 1  # of the embedding, which is on disk


def test_an_unfinished_run_counts_with_what_it_did() -> None:
    lines = ((1.0, "ready"), (2.0, "token 0"), (6.0, "token 1"), (10.0, "token 2"))
    run = read_run(WatchedRun(lines, None, "", 5, 6), 16)
    assert (run.steps, run.step_s, run.finished, run.ready_s) == (2, 4.0, False, 1.0)
    assert run.failure == ""
    rival = Competitor("other", "other", Path("x"))
    assert result(rival, [run], 30).tokens_per_s == 0.25


def test_a_run_without_a_second_step_gives_a_bound_and_a_failure_is_told() -> None:
    stopped = read_run(WatchedRun(((2.0, "token 0"),), None, "", 1, 1), 16)
    failed = read_run(WatchedRun((), 1, "Traceback: no memory\n", 1, 1), 16)
    rival = Competitor("other", "other", Path("x"), 8)
    summed = result(rival, [stopped, failed], 40)
    assert summed.tokens_per_s is None and summed.at_most_tokens_per_s == 0.2
    assert summed.failures == ("exit code 1: Traceback: no memory",)
    assert isinstance(stopped, Run)


def test_less_memory_than_python_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="give more memory"):
        competitors(tmp_path, PROCESS_BYTES, gguf=None, checkpoint=None, context=64)
    names = [
        one.name for one in competitors(tmp_path, 2 << 30, gguf=None, checkpoint=None, context=64)
    ]
    assert names == ["hmt", "hmt, batch 8", "hmt, mmap"]
