"""Bytes and where they are: ledger, pools, disk readers and their queue, NUMA, limits.

Nothing here knows what a tensor means.
"""

from hmt.memory.arena import PAGE_BYTES, POISON, HostBuffer
from hmt.memory.bitmap import Bitmap
from hmt.memory.host_pool import BufferOwner, HostPool, PoolStats
from hmt.memory.ledger import Account, Ledger
from hmt.memory.limits import (
    available_host_bytes,
    cgroup_limit_bytes,
    forget_peak,
    give_back,
    peak_resident_bytes,
    physical_host_bytes,
    resident_bytes,
    share_arenas,
)
from hmt.memory.numa import Binding, node_distances, numa_nodes
from hmt.memory.probe import (
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
from hmt.memory.reader_kinds import READERS, open_reader
from hmt.memory.readers import DiskReader, PreadReader
from hmt.memory.schedule import DiskRead, Ticket
from hmt.memory.size_classes import size_classes
from hmt.memory.transfer import QueueCounters, ReadCounters, TransferQueue

__all__ = [
    "PAGE_BYTES",
    "POISON",
    "READERS",
    "Account",
    "Binding",
    "Bitmap",
    "BufferOwner",
    "DiskRate",
    "DiskRead",
    "DiskReader",
    "HostBuffer",
    "HostPool",
    "Ledger",
    "PoolStats",
    "PreadReader",
    "QueueCounters",
    "ReadCounters",
    "Ticket",
    "TransferQueue",
    "available_host_bytes",
    "best_of",
    "cache_bytes",
    "cgroup_limit_bytes",
    "disk_rate",
    "file_to_read",
    "forget_peak",
    "give_back",
    "node_distances",
    "numa_nodes",
    "open_reader",
    "peak_resident_bytes",
    "physical_host_bytes",
    "quick_rate",
    "ram_read_rate",
    "resident_bytes",
    "share_arenas",
    "size_classes",
    "sweep",
    "usable_readers",
    "usual_rate",
]
