"""A machine of several NUMA nodes, of which a model has one."""

from dataclasses import replace

from hmt.contracts.machine import Machine

_OURS = 0.9  # of a node's memory, as hmt.memory.numa says


def on_its_nodes(machine: Machine, numa: tuple[int, int] | str | None, host_bytes: int) -> Machine:
    """What is left of `machine` for a model that is bound so; see hmt.memory.numa.choose.

    One node has its share of cores, memory and their rates; GPU, link and drive are as they were.
    """
    nodes = machine.numa_nodes
    fits = machine.device_name and host_bytes <= _OURS * machine.ram_bytes / nodes
    one = fits if numa == "auto" else numa is not None and numa[0] == numa[1]
    if nodes < 2 or not one:
        return machine
    return replace(
        machine,
        cores=max(1, machine.cores // nodes),
        ram_bytes=machine.ram_bytes // nodes,
        ram_read_rate=machine.ram_read_rate / nodes,
        cpu_rates={name: rate / nodes for name, rate in machine.cpu_rates.items()},
        cpu_ops={name: rate / nodes for name, rate in machine.cpu_ops.items()},
        shared_cpu_rate=machine.shared_cpu_rate / nodes,
        numa_nodes=1,
    )
