"""The limit is real: a model four times its memory limit generates, and the kernel agrees.

The limit is a cgroup of the operating system where this process may make one, else RLIMIT_DATA.
What the process needs besides the engine's budget is stated here: Python, torch and their buffers.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hmt.bench.random_model import write_random_llama

from hmt.base.units import MIB

OVERHEAD_BYTES = 512 * MIB

CHILD = """
import json, sys
import hmt
model_path, budget = sys.argv[1], int(sys.argv[2])
with hmt.Engine(host_memory=budget, context=64, prefill_chunk=16, threads=1) as engine:
    model = engine.load_model(model_path)
    done = model.infer(hmt.Request(input=[1, 2, 3, 4, 5], max_new_tokens=3, ignore_eos=True))
    summary = model.summary()
    print(json.dumps({
        "tokens": len(done.token_ids),
        "peak": summary.peak_rss_bytes,
        "used": sum(summary.used_bytes.values()),
        "read": summary.generation.disk_bytes,
        "streamed": summary.streamed_bytes,
    }))
"""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    write_random_llama(folder)
    return folder


def memory_cgroup() -> Path | None:
    """A fresh cgroup of ours that can limit memory, or None where we may not make one."""
    own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [group for _, controllers, group in own if "memory" in controllers.split(",")]
    root = Path("/sys/fs/cgroup/memory" + v1[0]) if v1 else Path("/sys/fs/cgroup")
    group = root / f"hmt-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    if not any((group / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
        group.rmdir()
        return None
    return group


@pytest.fixture
def cgroup() -> Iterator[Path | None]:
    group = memory_cgroup()
    yield group
    if group is not None:
        for _ in range(50):  # the kernel empties it a moment after the last process has gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def enter(group: Path | None, limit_bytes: int) -> None:
    """Put this (child) process under the limit."""
    if group is None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        return
    v1 = group / "memory.limit_in_bytes"
    (v1 if v1.exists() else group / "memory.max").write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.timeout(300)
def test_a_model_runs_under_a_quarter_of_its_size(big_model: Path, cgroup: Path | None) -> None:
    size = sum(file.stat().st_size for file in big_model.glob("*.safetensors"))
    assert size > 1.1e9
    budget = size // 4
    command = [sys.executable, "-c", CHILD, str(big_model), str(budget)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: enter(cgroup, budget + OVERHEAD_BYTES),
    )
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    report = json.loads(output)
    assert report["tokens"] == 3
    assert report["used"] <= budget
    assert report["streamed"] > size / 2 and report["read"] > size / 2
    kernel_peak = usage.ru_maxrss * 1024
    assert kernel_peak <= budget + OVERHEAD_BYTES
    assert abs(report["peak"] - kernel_peak) <= 0.02 * kernel_peak
