"""A machine of several NUMA nodes, of which a model has one, or those of one socket."""

from dataclasses import replace

from hmt.contracts.machine import ComputeRates, Machine

_OURS = 0.9  # of a node's memory, as hmt.memory.numa says
_APART = 20  # from this distance on a node is behind another socket, as it says, too


def on_numa_nodes(machine: Machine, numa: tuple[int, int] | str | None, host_bytes: int) -> Machine:
    """What is left of `machine` for a model that is bound so; see hmt.memory.numa.choose.

    Each node has its share of cores, memory and their rates; GPU, link and disk are as they were.
    """
    nodes, had = machine.numa_nodes, 1
    if numa == "auto":
        had = _beside(machine)
        fits = host_bytes <= _OURS * machine.ram_bytes * had / nodes
        bound = bool(machine.devices) and fits
    else:
        bound = numa is not None and numa[0] == numa[1]
    if had >= nodes or not bound:
        return machine
    share = had / nodes
    return replace(
        machine,
        cores=max(1, int(machine.cores * share)),
        ram_bytes=int(machine.ram_bytes * share),
        cpu=faster(machine.cpu, share),
        devices=tuple(
            replace(device, shared_cpu_rate=device.shared_cpu_rate * share)
            for device in machine.devices
        ),
        numa_nodes=had,
        numa_distances=tuple(row[:had] for row in machine.numa_distances[:had]),
        remote_share=machine.remote_share if had == 1 else 1.0,  # that of the socket itself
    )


def faster(rates: ComputeRates, times: float) -> ComputeRates:
    """The processor with so many times the memory and arithmetic rates."""
    return replace(
        rates,
        read_rate=rates.read_rate * times,
        gemm={name: rate * times for name, rate in rates.gemm.items()},
        attention_read_rate=rates.attention_read_rate * times,
        attention_ops=rates.attention_ops * times,
    )


def _beside(machine: Machine) -> int:
    """Nodes of a socket, of the smallest where they differ; 1 where distances are not known."""
    rows = [sum(far < _APART for far in row) for row in machine.numa_distances]
    return max(1, min(rows, default=1))
