"""Parameters: which bytes they are, how they lie in memory, and the store that moves them."""

from hmt.weights.binding import BoundBlock, BoundParam, FileRange, bind, published_bytes
from hmt.weights.eviction import LRU, EvictionPolicy
from hmt.weights.layout import BlockLayout, lay_out
from hmt.weights.rows import row_span_bytes
from hmt.weights.spill import SpillFile
from hmt.weights.store import StoreCounters, WeightStore

__all__ = [
    "LRU",
    "BlockLayout",
    "BoundBlock",
    "BoundParam",
    "EvictionPolicy",
    "FileRange",
    "SpillFile",
    "StoreCounters",
    "WeightStore",
    "bind",
    "lay_out",
    "published_bytes",
    "row_span_bytes",
]
