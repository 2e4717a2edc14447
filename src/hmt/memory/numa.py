"""Threads and memory on NUMA nodes: what there is, where a model belongs, and whether it is there.

Through the kernel's own interfaces: sysfs, sched_setaffinity, set_mempolicy, and /proc to check.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import MachineError
from hmt.base.units import format_bytes

_SYS, _PROC = Path("/sys"), Path("/proc/thread-self")
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # asm/unistd.h
_APART = 20  # from this distance on memory is behind another socket; 11 or 12 is the same one
_OURS = 0.9  # of a node's memory; the rest is the system's and the driver's
_MASK_BITS = 64

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Binding:
    """Where threads run and memory is taken.

    cpu_nodes   none: wherever the process may
    memory_nodes   one, or several among which memory is spread page by page; none: the kernel's way
    reason     why, for people
    """

    cpu_nodes: tuple[int, ...] = ()
    memory_nodes: tuple[int, ...] = ()
    reason: str = ""

    def apply(self, sysfs: Path = _SYS) -> None:
        """Bind this thread, and those it starts.

        Raises MachineError when a node has no usable CPU, or the kernel refuses.
        """
        if self.cpu_nodes:
            cpus = _cpus_of(self.cpu_nodes, sysfs) & os.sched_getaffinity(0)
            if not cpus:
                raise MachineError(
                    f"no CPU of NUMA node {_text(self.cpu_nodes)} may be used by this process"
                )
            os.sched_setaffinity(0, cpus)
        if self.memory_nodes:
            mode = _MPOL_BIND if len(self.memory_nodes) == 1 else _MPOL_INTERLEAVE
            _set_policy(mode, self.memory_nodes)


def numa_nodes(sysfs: Path = _SYS) -> dict[int, frozenset[int]]:
    """CPUs by NUMA node; one node 0 with all CPUs where the kernel does not say."""
    folder = sysfs / "devices/system/node"
    nodes = {
        int(path.name.removeprefix("node")): _cpu_list((path / "cpulist").read_text())
        for path in sorted(folder.glob("node[0-9]*"))
    }
    return nodes or {0: frozenset(os.sched_getaffinity(0))}


def node_bytes(node: int, sysfs: Path = _SYS) -> int:
    """Memory of a node; 0 where the kernel does not say."""
    try:
        text = (sysfs / f"devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"MemTotal:\s*(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def node_distances(sysfs: Path = _SYS) -> tuple[tuple[int, ...], ...]:
    """How far memory is from each node, as the firmware says: a row of 10 for its own and more.

    Rows and columns are the nodes, ascending.  Empty where there is one, or nobody says.
    """
    nodes = sorted(numa_nodes(sysfs))
    rows = []
    for node in nodes if len(nodes) > 1 else ():
        try:
            text = (sysfs / f"devices/system/node/node{node}/distance").read_text()
            rows.append(tuple(map(int, text.split())))
        except (OSError, ValueError):
            return ()
    return tuple(rows) if all(len(row) == len(nodes) for row in rows) else ()


def nodes_beside(node: int, sysfs: Path = _SYS) -> tuple[int, ...]:
    """`node` and those that are nearly as near: parts of one socket, where it is cut into several.

    Their memory is behind other controllers of the same chip, so it is as fast, and their cores
    are needed to read it.
    """
    nodes, distances = sorted(numa_nodes(sysfs)), node_distances(sysfs)
    if not distances:
        return (node,)
    row = distances[nodes.index(node)]
    return tuple(n for n, far in zip(nodes, row, strict=True) if n == node or far < _APART)


def node_of_pci(address: str, sysfs: Path = _SYS) -> int | None:
    """The node next to a device such as "0000:18:00.0"; None where the kernel does not know."""
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def choose(
    asked: tuple[int, int] | str, *, host_bytes: int, device: str = "", sysfs: Path = _SYS
) -> Binding:
    """What a choice means on this machine.

    asked   (CPU node, memory node), or "auto"
    device  PCI address of the GPU in use; "" without one

    "auto": with a GPU, its own node, and those beside it on its socket, where `host_bytes` fit
    there, so that copies do not cross to another socket; otherwise memory is spread over all nodes,
    whose rates then add up, and threads run everywhere.  Where there is one node nothing is bound.
    Raises MachineError for a node that does not exist.
    """
    nodes = numa_nodes(sysfs)
    if asked != AUTO:
        assert isinstance(asked, tuple)
        for node in asked:
            if node not in nodes:
                known = ", ".join(map(str, sorted(nodes)))
                raise MachineError(
                    f"NUMA node {node} was asked for; this machine has node(s) {known}"
                )
        return Binding((asked[0],), (asked[1],), "as asked")
    if len(nodes) < 2:
        return Binding(reason="this machine has one NUMA node: nothing to bind")
    filled = tuple(sorted(node for node in nodes if node_bytes(node, sysfs)))
    everywhere = filled if len(filled) > 1 else ()
    if not device:
        return Binding((), everywhere, "without a GPU, memory is spread over all nodes")
    near = node_of_pci(device, sysfs)
    if near is None or near not in nodes or not nodes[near] & os.sched_getaffinity(0):
        return Binding((), everywhere, "it is not known which node the GPU is next to")
    beside = nodes_beside(near, sysfs)
    room = int(_OURS * sum(node_bytes(node, sysfs) for node in beside))
    others = f" and those beside it ({_text(beside)})" if len(beside) > 1 else ""
    if host_bytes > room or len(beside) == len(nodes):
        told = f"{format_bytes(host_bytes)} do not fit node {near}, the GPU's{others}"
        if host_bytes <= room:
            told = f"node {near}, the GPU's, is beside all others"
        return Binding((), everywhere, f"{told}: memory is spread")
    filled = tuple(node for node in beside if node_bytes(node, sysfs))
    return Binding(beside, filled, f"the GPU is next to node {near}{others}")


def bytes_by_node(proc: Path = _PROC) -> dict[int, int]:
    """Memory of this process by the node where it lies, from numa_maps; empty if not known."""
    found: dict[int, int] = {}
    try:
        text = (proc / "numa_maps").read_text()
    except OSError:
        return found
    for line in text.splitlines():
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            nbytes = int(pages) * 1024 * (int(size[1]) if size else 4)
            found[int(node)] = found.get(int(node), 0) + nbytes
    return found


def allowed_cpus(proc: Path = _PROC) -> frozenset[int]:
    """CPUs on which the process may run, as the kernel says."""
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", (proc / "status").read_text(), re.MULTILINE)
    return _cpu_list(found[1]) if found else frozenset()


def verify(
    binding: Binding, before: dict[int, int], *, proc: Path = _PROC, sysfs: Path = _SYS
) -> str:
    """Whether what was asked is so, in words; for the thread that `apply` was called on.

    before   `bytes_by_node` of when memory was not bound yet, which stays where it was
    """
    told = []
    if binding.cpu_nodes:
        strays = allowed_cpus(proc) - _cpus_of(binding.cpu_nodes, sysfs)
        where = f"threads on node {_text(binding.cpu_nodes)}"
        told.append(f"{where}, but for CPUs {_text(strays)}" if strays else where)
    now = bytes_by_node(proc)
    grown = {node: max(0, nbytes - before.get(node, 0)) for node, nbytes in now.items()}
    total = sum(grown.values())
    if binding.memory_nodes and total:
        shares = ", ".join(
            f"{grown[node] / total:.0%} on node {node}" for node in sorted(grown) if grown[node]
        )
        told.append(f"{format_bytes(total)} of memory: {shares}")
    return "; ".join([binding.reason, *told])


def _set_policy(mode: int, nodes: tuple[int, ...]) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise MachineError(f"memory binding is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    if libc.syscall(number, mode, ctypes.byref(mask), ctypes.c_ulong(_MASK_BITS)) != 0:
        reason, where = os.strerror(ctypes.get_errno()), ", ".join(map(str, nodes))
        raise MachineError(f"the kernel refused to bind memory to NUMA node {where}: {reason}")


def _cpus_of(nodes: Iterable[int], sysfs: Path) -> frozenset[int]:
    known = numa_nodes(sysfs)
    return frozenset().union(*(known[node] for node in nodes))


def _text(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _cpu_list(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
