"""Binding threads and memory to NUMA nodes, through the kernel's own interfaces."""

import ctypes
import os
import platform
from pathlib import Path

from hmt.base.errors import MachineError

_NODES = Path("/sys/devices/system/node")
_MPOL_BIND = 2  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h


def numa_nodes() -> dict[int, frozenset[int]]:
    """CPUs by NUMA node; one node 0 with all CPUs where the kernel does not say."""
    nodes = {
        int(path.name.removeprefix("node")): _cpu_list((path / "cpulist").read_text())
        for path in sorted(_NODES.glob("node[0-9]*"))
    }
    return nodes or {0: frozenset(os.sched_getaffinity(0))}


def bind(cpu_node: int, memory_node: int) -> None:
    """Run this thread and those it starts on `cpu_node`; take new memory from `memory_node`.

    Raises MachineError when a node does not exist, has no usable CPU, or the kernel refuses.
    """
    nodes = numa_nodes()
    for node in (cpu_node, memory_node):
        if node not in nodes:
            known = ", ".join(map(str, sorted(nodes)))
            raise MachineError(f"NUMA node {node} was asked for; this machine has node(s) {known}")
    cpus = nodes[cpu_node] & os.sched_getaffinity(0)
    if not cpus:
        raise MachineError(f"no CPU of NUMA node {cpu_node} may be used by this process")
    os.sched_setaffinity(0, cpus)
    _bind_memory(memory_node)


def _bind_memory(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise MachineError(f"memory binding is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node)
    if libc.syscall(number, _MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(64)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MachineError(f"the kernel refused to bind memory to NUMA node {node}: {reason}")


def _cpu_list(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
