"""Beginnings of sequences whose KV pages exist already: in memory, and on the disk."""

from hmt.kvcache.prefix.cache import Opened, PrefixCache
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.saved_states import SavedStates, state_piece_bytes
from hmt.kvcache.prefix.store import PrefixStore, StoreCounters, store_buffer_bytes
from hmt.kvcache.prefix.tree import PrefixCounters, PrefixTree, keep_prefixes

__all__ = [
    "Opened",
    "PageExtents",
    "PrefixCache",
    "PrefixCounters",
    "PrefixStore",
    "PrefixTree",
    "SavedStates",
    "StoreCounters",
    "keep_prefixes",
    "state_piece_bytes",
    "store_buffer_bytes",
]
