"""Beginnings of sequences whose KV pages exist already: in memory, and on the disk."""

from hmt.kvcache.prefix.cache import PrefixCache
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.radix_tree import PrefixTree, keep_prefixes
from hmt.kvcache.prefix.saved_states import SavedStates, state_piece_bytes
from hmt.kvcache.prefix.store import PrefixStore, store_buffer_bytes
