"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.allocator import KVAllocator
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.key_ranges import KeyRange
from hmt.kvcache.offload.factory import group_bytes_as, kv_sizes, open_tiered, page_encoding
from hmt.kvcache.offload.graph_cache import GraphKVCache
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.page_layout import page_bytes
from hmt.kvcache.page_pool import PagePool
from hmt.kvcache.paged_cache import PagedKV
from hmt.kvcache.recurrent_state import StateStore
from hmt.kvcache.sequence_slots import SequenceSlots
from hmt.kvcache.split_cache import AnyKV, SplitKVCache
from hmt.kvcache.state_checkpoints import checkpoint_interval
