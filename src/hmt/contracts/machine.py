"""A machine as data: everything that planning and prediction need to know of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """One processor: all usable CPU cores together, or one GPU.  0 or an absent entry: not known.

    read_rate            of its memory, bytes per second
    gemm                 products with weights, by encoding and number of tokens: "w4a8@1" is weight
                         bytes per second; "w4a8@16" and "w4a8@512" are operations per second
    attention_read_rate  bytes of KV cache per second with one query token
    attention_ops        operations per second of prefill attention
    step_overhead_s      scheduling, sampling and Python, once per step; of a GPU what it takes
                         itself
    sequence_overhead_s  of each sequence in a step
    layer_overhead_s     of each layer in a decode step, beyond what it reads and computes
    prefill_layer_overhead_s   of each layer in a prefill step: on a GPU the CPU's kernel launches
    """

    read_rate: float = 0.0
    gemm: Mapping[str, float] = field(default_factory=dict)
    attention_read_rate: float = 0.0
    attention_ops: float = 0.0
    step_overhead_s: float = 0.0
    sequence_overhead_s: float = 0.0
    layer_overhead_s: float = 0.0
    prefill_layer_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """A GPU and its link to host memory.  0: not known.

    memory_bytes      that can be used
    link_rate         bytes per second from pinned host memory
    shared_link_rate, shared_cpu_rate   of the link, and of the CPU multiplying with weights of the
                      model's usual format, while both are busy
    sync_overhead_s   of handing over from GPU to CPU, or back
    driver_bytes      of its memory that the driver and libraries keep, beside what plans reserve
    """

    name: str
    memory_bytes: int
    link_rate: float = 0.0
    compute: ComputeRates = field(default_factory=ComputeRates)
    shared_link_rate: float = 0.0
    shared_cpu_rate: float = 0.0
    sync_overhead_s: float = 0.0
    driver_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of a machine, or written down about one.

    Rates are bytes per second; 0, or an absent entry, means not known.

    cores                  that may compute
    cpu                    rates of all of them together; memory is read each node by its own cores
    disk_bytes, disk_read_rate   of the disk that holds the model; its size, 0: not known
    disk_block_overhead_s  of each block read from the disk, beyond its bytes
    devices                GPUs, in the order of their ids
    numa_nodes             of the memory that a model is spread over
    numa_distances         of memory from each node, a row per node: 10 for its own; not known:
                           empty
    remote_share           of the rate of a node's own memory, what another node's gives
    process_bytes          by which a process grows that loads a plan and runs it, beside what plans
                           reserve
    streaming_bytes, converting_bytes   beyond process_bytes, where weights come from the disk, and
                           where they are converted then
    note                   where the figures come from
    """

    name: str
    cores: int
    ram_bytes: int
    disk_read_rate: float
    cpu: ComputeRates = field(default_factory=ComputeRates)
    disk_bytes: int = 0
    disk_block_overhead_s: float = 0.0
    devices: tuple[DeviceRates, ...] = ()
    numa_nodes: int = 1
    numa_distances: tuple[tuple[int, ...], ...] = ()
    remote_share: float = 1.0
    process_bytes: int = 0
    streaming_bytes: int = 0
    converting_bytes: int = 0
    note: str = ""

    @property
    def device(self) -> DeviceRates | None:
        """The GPU that plans use: the first one; None without one."""
        return self.devices[0] if self.devices else None

    @property
    def device_bytes(self) -> int:
        """Memory of that GPU; 0 without one."""
        return self.devices[0].memory_bytes if self.devices else 0

    def with_device_bytes(self, nbytes: int) -> "Machine":
        """The machine with so much memory on that GPU; without one, as it is."""
        if not self.devices:
            return self
        first, *others = self.devices
        return replace(self, devices=(replace(first, memory_bytes=nbytes), *others))

    @property
    def spread_read_rate(self) -> float:
        """Of memory that is spread over all nodes, read by all cores."""
        others = (self.numa_nodes - 1) * self.remote_share
        return self.cpu.read_rate * (1 + others) / self.numa_nodes
