"""NUMA: what a choice means on machines in a tree like sysfs, and what the kernel says of it."""

import os
from pathlib import Path

import pytest

from hmt.base.errors import MachineError
from hmt.base.units import GIB, format_bytes
from hmt.memory import Binding, numa_nodes
from hmt.memory import numa as room
from hmt.memory.numa import (
    allowed_cpus,
    bytes_by_node,
    choose,
    node_distances,
    node_of_pci,
    nodes_beside,
    verify,
)

GPU = "0000:18:00.0"


def machine(
    tmp_path: Path, memory: list[int], gpu_node: int = 1, distances: list[list[int]] | None = None
) -> Path:
    """One with so many GiB in each node, this process's CPUs shared out among them."""
    cpus = sorted(os.sched_getaffinity(0))
    for node, gib in enumerate(memory):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        own = cpus[node::2] if gib else []
        if distances is not None:
            (folder / "distance").write_text(" ".join(map(str, distances[node])) + "\n")
        (folder / "cpulist").write_text(",".join(map(str, own)) + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {gib << 20} kB\n")
    card = tmp_path / f"bus/pci/devices/{GPU}"
    card.mkdir(parents=True)
    (card / "numa_node").write_text(f"{gpu_node}\n")
    return tmp_path


def test_auto_is_the_gpus_node_where_the_model_fits_and_all_nodes_otherwise(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, [64, 64])
    assert node_of_pci(GPU, sysfs) == 1 and node_of_pci("0000:99:00.0", sysfs) is None
    near = choose("auto", host_bytes=40 * GIB, device=GPU, sysfs=sysfs)
    if len(os.sched_getaffinity(0)) > 1:
        assert (near.cpu_nodes, near.memory_nodes) == ((1,), (1,))
    large = choose("auto", host_bytes=60 * GIB, device=GPU, sysfs=sysfs)
    alone = choose("auto", host_bytes=GIB, sysfs=sysfs)
    unknown = choose("auto", host_bytes=GIB, device="0000:99:00.0", sysfs=sysfs)
    for spread in (large, alone, unknown):
        assert (spread.cpu_nodes, spread.memory_nodes) == ((), (0, 1))
        assert spread.reason
    assert choose((0, 1), host_bytes=GIB, sysfs=sysfs) == Binding((0,), (1,), "as asked")
    with pytest.raises(MachineError, match=r"node 7 was asked for.*0, 1"):
        choose((7, 0), host_bytes=GIB, sysfs=sysfs)


def test_nodes_of_one_socket_belong_together(tmp_path: Path) -> None:
    rows = [[10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]]
    four = machine(tmp_path / "four", [64] * 4, 1, rows)
    assert node_distances(four) == tuple(map(tuple, rows))
    assert [nodes_beside(node, four) for node in (0, 3)] == [(0, 1), (2, 3)]
    if len(os.sched_getaffinity(0)) > 1:
        near = choose("auto", host_bytes=100 * GIB, device=GPU, sysfs=four)
        assert near.cpu_nodes == near.memory_nodes == (0, 1) and "beside it (0, 1)" in near.reason
    large = choose("auto", host_bytes=120 * GIB, device=GPU, sysfs=four)
    assert large.cpu_nodes == () and large.memory_nodes == (0, 1, 2, 3)
    # A socket alone, cut into parts, is all there is: nothing is gained by leaving cores out.
    one = machine(tmp_path / "one", [64, 64], 1, [[10, 11], [11, 10]])
    assert choose("auto", host_bytes=GIB, device=GPU, sysfs=one).cpu_nodes == ()
    # Distances that are damaged, or are not told, are not known.
    (four / "devices/system/node/node2/distance").write_text("21 21 10\n")
    assert node_distances(four) == () and nodes_beside(0, four) == (0,)
    assert node_distances(machine(tmp_path / "none", [64, 64])) == ()
    assert node_distances(tmp_path / "nothing") == ()


def test_memory_without_cpus_and_cpus_without_memory_are_no_place(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, [64, 0], gpu_node=1)
    assert choose("auto", host_bytes=GIB, device=GPU, sysfs=sysfs).memory_nodes == ()
    with pytest.raises(MachineError, match="no CPU of NUMA node 1"):
        Binding((1,), (1,)).apply(sysfs)


def test_one_node_has_nothing_to_bind(tmp_path: Path) -> None:
    for sysfs in (machine(tmp_path, [64], gpu_node=-1), tmp_path / "none"):
        found = choose("auto", host_bytes=GIB, device=GPU, sysfs=sysfs)
        assert not found.cpu_nodes and not found.memory_nodes and "one" in found.reason
        before = os.sched_getaffinity(0)
        found.apply(sysfs)
        assert os.sched_getaffinity(0) == before


def test_what_is_bound_is_asked_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(room, "_set_policy", lambda mode, nodes: asked.append((mode, nodes)))
    sysfs = machine(tmp_path, [64, 64])
    before = os.sched_getaffinity(0)
    try:
        Binding((), (0, 1)).apply(sysfs)
        assert os.sched_getaffinity(0) == before
        Binding((0,), (0,)).apply(sysfs)
        assert os.sched_getaffinity(0) == numa_nodes(sysfs)[0]
        assert asked == [(3, (0, 1)), (2, (0,))]
        assert allowed_cpus() == numa_nodes(sysfs)[0]
    finally:
        os.sched_setaffinity(0, before)


def test_proc_says_where_everything_is(tmp_path: Path) -> None:
    sysfs, proc = machine(tmp_path, [64, 64]), tmp_path / "proc"
    proc.mkdir()
    (proc / "numa_maps").write_text(
        "7f00 bind:0 anon=600 dirty=600 N0=500 N1=100 kernelpagesize_kB=4\n"
        "7f10 bind:0 anon=2 N0=2 kernelpagesize_kB=2048\n"
        "7f20 default file=/lib/libc.so mapped=3 N1=3\n"
    )
    own = sorted(numa_nodes(sysfs)[0])
    (proc / "status").write_text(f"Cpus_allowed:\t3\nCpus_allowed_list:\t{own[0]}\n")
    found = bytes_by_node(proc)
    assert found == {0: 500 * 4096 + (4 << 20), 1: 103 * 4096}
    told = verify(Binding((0,), (0,), "as asked"), {1: 103 * 4096}, proc=proc, sysfs=sysfs)
    grown = format_bytes(500 * 4096 + (4 << 20))
    assert told == f"as asked; threads on node 0; {grown} of memory: 100% on node 0"
    (proc / "status").write_text("Cpus_allowed_list:\t900-901\n")
    told = verify(Binding((0,), (0,), ""), {}, proc=proc, sysfs=sysfs)
    assert "but for CPUs 900, 901" in told and "on node 1" in told
    assert bytes_by_node(tmp_path / "nowhere") == {}
