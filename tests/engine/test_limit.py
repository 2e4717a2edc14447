"""The limit is real: a model four times its memory limit generates, and the kernel agrees.

The limit is a cgroup of the operating system where this process may make one, else RLIMIT_DATA.
Besides the engine's budget the process may take what the same program takes with the embedded model
and 4 MiB (0.4 GB with a CPU build of torch, 0.8 GB with a CUDA build), and OVERHEAD_BYTES.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hmt.base.units import MIB
from hmt.cli.options import embedded_model
from hmt.hardware.machine import machine_for
from hmt.profiling.random_model import Shape, write_random_model

OVERHEAD_BYTES = 128 * MIB  # stacks, allocator, temporaries of larger layers

CHILD = """
import json, sys
import hmt
model_path, budget = sys.argv[1], int(sys.argv[2])
with hmt.Engine(host_memory=budget, context=64, max_prefill_tokens=16, threads=1) as engine:
    model = engine.load_model(model_path)
    done = model.infer(hmt.Request(input=[1, 2, 3, 4, 5], max_new_tokens=2, ignore_eos=True))
    summary = model.summary()
    print(json.dumps({
        "tokens": len(done.token_ids),
        "peak": summary.peak_rss_bytes,
        "used": sum(summary.used_bytes.values()),
        "read": summary.generation.disk_bytes,
        "streamed": summary.streamed_bytes,
    }))
"""

# Limits itself, runs a command, and prints the peak that the kernel counted for it.  A process of
# its own, because a child starts with the peak of the process that it was forked from.
LAUNCHER = """
import os, pathlib, resource, sys
group, limit, command = sys.argv[1], sys.argv[2], sys.argv[3:]
child = os.fork()
if not child:
    if group:
        file = pathlib.Path(group, "memory.limit_in_bytes")
        (file if file.exists() else pathlib.Path(group, "memory.max")).write_text(limit)
        pathlib.Path(group, "cgroup.procs").write_text(str(os.getpid()))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    os.execv(command[0], command)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status) and 1)
"""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    write_random_model(folder, Shape())
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


@pytest.mark.timeout(300)
def test_a_model_runs_under_a_quarter_of_its_size(big_model: Path, cgroup: Path | None) -> None:
    machine_for(big_model)  # measured here, so that the measurement is no part of the child's peak
    size = sum(file.stat().st_size for file in big_model.glob("*.safetensors"))
    assert size > 1.1e9
    budget = size // 4
    tiny = subprocess.run(
        [sys.executable, "-c", CHILD, str(embedded_model()), str(4 * MIB)],
        capture_output=True,
        check=True,
    )
    limit = budget + json.loads(tiny.stdout)["peak"] + OVERHEAD_BYTES
    launcher = [sys.executable, "-c", LAUNCHER, str(cgroup or ""), str(limit)]
    command = [sys.executable, "-c", CHILD, str(big_model), str(budget)]
    run = subprocess.run([*launcher, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report, kernel_peak = map(json.loads, run.stdout.splitlines())
    assert report["tokens"] == 2
    assert report["used"] <= budget
    assert report["streamed"] > size / 2 and report["read"] > size / 2
    assert kernel_peak <= limit
    assert abs(report["peak"] - kernel_peak) <= 0.02 * kernel_peak
