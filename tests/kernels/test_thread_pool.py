"""The pool of threads under the compiled kernels, and how it counts what it may use."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.kernels.cpu import extension
from hmt.kernels.cpu.threads import awake_workers

native = extension.load()
pytestmark = pytest.mark.skipif(
    native is None, reason="the extension was not built, or HMT_KERNELS=reference"
)


@pytest.fixture(autouse=True)
def pool():
    before = native.threads()
    yield
    native.set_threads(before)


def visited_once(count: int, grain: int, threads: int) -> bool:
    visits = torch.zeros(count + 2, dtype=torch.uint8)
    native.share_test(visits.data_ptr() + 1, count, grain, threads)
    return bool((visits[1:-1] == 1).all() and visits[0] == visits[-1] == 0)


@given(
    count=st.integers(0, 3000),
    grain=st.integers(1, 400),
    threads=st.integers(1, 9),
    size=st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_each_row_is_computed_once(count, grain, threads, size):
    if native.threads() != size:
        native.set_threads(size)
    assert visited_once(count, grain, threads)
    assert native.threads() == size


def test_many_callers_while_the_size_changes():
    wrong, done = [], threading.Event()

    def call(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(400):
            case = draw.randrange(2000), draw.randrange(1, 300), draw.randrange(1, 7)
            if not visited_once(*case):
                wrong.append(case)

    def resize() -> None:
        draw = random.Random(0)
        while not done.wait(0.002):
            native.set_threads(draw.randrange(7))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    changer = threading.Thread(target=resize)
    for thread in (*callers, changer):
        thread.start()
    for thread in callers:
        thread.join()
    done.set()
    changer.join()
    assert not wrong


def test_sums_do_not_depend_on_the_threads():
    words = torch.randint(0, 2**62, ((5 << 20) + 3,))
    sums = set()
    for size in (1, 2, 3, 8):
        native.set_threads(size)
        sums.add(native.sum_words(words.data_ptr(), words.numel()))
    assert sums == {int(words.sum()) % 2**64}


_FORK = """
import os, signal, sys, threading
import torch
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.threads import awake_workers

native = extension.load()
native.set_threads(3)

def once():
    visits = torch.zeros(5000, dtype=torch.uint8)
    native.share_test(visits.data_ptr(), 5000, 10, 3)
    return bool((visits == 1).all())

done = threading.Event()
def keep_busy():
    while not done.is_set():
        once()

assert once()
other = threading.Thread(target=keep_busy)
other.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        good = once() and once()
        native.set_threads(2)
        os._exit(0 if good and once() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert once()
done.set()
other.join()
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan's own locks hang")
def test_a_forked_child_computes():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=100)


def test_only_the_thread_that_asks_is_pinned():
    before = os.sched_getaffinity(0)
    seen = []

    def pinned() -> None:
        native.pin_caller(True)
        native.pin_caller(True)
        seen.append(os.sched_getaffinity(0))
        seen.append(visited_once(1000, 10, 4))
        native.set_threads(0)  # of the process, not of what this thread is pinned to
        seen.append(native.threads())
        native.pin_caller(False)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    topology = native.Topology()
    cores = [set(cpus) for cpus, _ in topology.cores]
    assert seen == [seen[0], True, topology.threads, before] and set(seen[0]) in cores
    assert os.sched_getaffinity(0) == before


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return str(root)


def siblings(*cores: str, file: str = "core_cpus_list") -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{file}": core
        for core in cores
        for cpu in core.replace("-", ",").split(",")
    }


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_count_once(tmp_path, file):
    root = write(tmp_path, siblings("0,4", "1,5", "2,6", "3,7", file=file))
    assert native.Topology(root, list(range(8))).threads == 4
    # Only the second thread of core 1 is ours.
    some = native.Topology(root, [0, 4, 5])
    assert some.cores == [([0, 4], 0), ([5], 0)] and some.threads == 2


def test_nodes_are_numbered_as_far_as_they_are_ours(tmp_path):
    nodes = {"sys/devices/system/node/online": "0-2"}
    for node, cpus in enumerate(("0-1", "2,5", "3-4")):
        nodes[f"sys/devices/system/node/node{node}/cpulist"] = cpus
    root = write(tmp_path, nodes)
    topology = native.Topology(root, [2, 3, 4, 5])
    assert topology.cores == [([2], 0), ([5], 0), ([3], 1), ([4], 1)] and topology.nodes == 2


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, 0, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 0, 8),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5, 2),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        ({"sys/fs/cgroup/cpu.max": "6400000 100000"}, 64, 8),
        (
            {
                "proc/self/cgroup": "0::/outer/inner",
                "sys/fs/cgroup/outer/cpu.max": "300000 100000",
                "sys/fs/cgroup/outer/inner/cpu.max": "500000 100000",
            },
            3,
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/x\n3:cpu,cpuacct:/job\n0::/",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
            4,
        ),
        ({"proc/self/cgroup": "nonsense\n::\n0::", "sys/fs/cgroup/cpu.max": ""}, 0, 8),
    ],
)
def test_quotas_of_cgroups_limit_the_threads(tmp_path, files, quota, threads):
    topology = native.Topology(write(tmp_path, files), list(range(8)))
    assert (topology.quota, topology.threads) == (quota, threads)


def test_workers_that_stay_awake_do_what_they_are_asked():
    with awake_workers():
        for gap_s in (0.0, 0.001, 0.007):  # the last one longer than they watch
            time.sleep(gap_s)
            assert visited_once(2000, 10, 4)
    assert visited_once(2000, 10, 4)
