"""Bytes and where they are: ledger, pools, disk readers and their queue, NUMA, limits.

Nothing here knows what a tensor means.
"""

from hmt.memory.allocator.arena import PAGE_BYTES, POISON, HostBuffer
from hmt.memory.allocator.bitmap import Bitmap
from hmt.memory.allocator.host_pool import HostPool, PoolStats
from hmt.memory.allocator.size_classes import size_classes
from hmt.memory.disk.bandwidth_probe import (
    DiskRate,
    best_of,
    cache_bytes,
    disk_rate,
    file_to_read,
    quick_rate,
    ram_read_rate,
    sweep,
    usable_readers,
    usual_rate,
)
from hmt.memory.disk.read_queue import QueueCounters, ReadQueue
from hmt.memory.disk.read_scheduler import DiskRead, ReadGroup
from hmt.memory.disk.reader_kinds import READERS, open_reader
from hmt.memory.disk.readers import DiskReader, PreadReader
from hmt.memory.ledger import Account, Ledger
from hmt.memory.numa import Binding, node_distances, numa_nodes
from hmt.memory.process_memory import (
    available_host_bytes,
    cgroup_limit_bytes,
    keep_freed_activations,
    limit_malloc_arenas,
    peak_resident_bytes,
    physical_host_bytes,
    reset_peak_resident,
    resident_bytes,
    trim_heap,
)
