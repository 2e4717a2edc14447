"""What a node's cores read of their own memory and of another node's.

`main` with CPU_NODE MEMORY_NODE SECONDS prints bytes per second, in a process of its own: threads
and memory stay where they were bound.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hmt.base.errors import HMTError
from hmt.base.units import MIB
from hmt.hardware.ram_rate import reader
from hmt.memory import Binding, cache_bytes, node_distances, numa_nodes, ram_read_rate
from hmt.memory.numa import node_bytes

_SYS = Path("/sys")
_LEAST_BYTES = 512 * MIB
_PATIENCE_S = 60.0
_RUN = "from hmt.hardware.numa_rates import main; main()"

RateOf = Callable[[int, int], float]
"""Of a node's cores that read the memory of a node; 0 where that could not be measured."""


@dataclass(frozen=True, slots=True)
class NumaRates:
    """Bytes per second of one node's cores; 0 where nothing was measured, or there is one node.

    own    of their own memory
    other  of other nodes', on average over these
    nodes  that have memory, and cores that this process may use
    """

    own: float = 0.0
    other: float = 0.0
    nodes: int = 0

    @property
    def together(self) -> float:
        """Of all nodes' cores that read, each its own node's; 0 where there is one such node.

        All cores that read what lies on one node are slower.
        """
        return self.nodes * self.own if self.nodes > 1 else 0.0

    @property
    def remote_share(self) -> float:
        """Of the rate of a node's own memory; 1 where it is not known."""
        return min(1.0, self.other / self.own) if self.own and self.other else 1.0


def numa_rates(
    rate_of: RateOf, sysfs: Path = _SYS, allowed: frozenset[int] | None = None
) -> NumaRates:
    """From the first node that has memory and cores, of those that are `allowed` (None: to us).

    Nodes that are as far away count as alike.
    """
    cpus, ours = numa_nodes(sysfs), os.sched_getaffinity(0) if allowed is None else allowed
    there = [node for node in sorted(cpus) if node_bytes(node, sysfs)]
    computing = [node for node in there if cpus[node] & ours]
    if not computing or len(there) < 2:
        return NumaRates()
    first = computing[0]
    rows = node_distances(sysfs)
    far = dict(zip(sorted(cpus), rows[sorted(cpus).index(first)], strict=True)) if rows else {}
    others = sorted((node for node in there if node != first), key=lambda n: (far.get(n, 0), n))
    own = rate_of(first, first)
    taken_s = 0.0  # that a byte of each of them takes
    for _, alike in groupby(others, key=lambda n: far.get(n, 0)):
        nodes = list(alike)
        rate = rate_of(first, nodes[0])
        if not rate or not own:
            return NumaRates()
        taken_s += len(nodes) / rate
    return NumaRates(own, len(others) / taken_s, len(computing))


def measured_apart(seconds: float) -> RateOf:
    """Rates as processes of their own measure them, each for so long."""

    def rate(cpu_node: int, memory_node: int) -> float:
        given = (str(cpu_node), str(memory_node), str(seconds))
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RUN, *given],
                capture_output=True, text=True, timeout=seconds + _PATIENCE_S, check=True,
            )  # fmt: skip
            return float(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return 0.0

    return rate


def main() -> None:
    """See the module's text."""
    cpu_node, memory_node, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        Binding((cpu_node,), (memory_node,)).apply()
        read, _ = reader()
        print(ram_read_rate(read, max(_LEAST_BYTES, 4 * cache_bytes()), seconds))
    except (HMTError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
