"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.opening import encoding_of, group_bytes_as, kv_sizes, open_tiered
from hmt.kvcache.pages import page_bytes
from hmt.kvcache.placed import AnyKV, PlacedKV
from hmt.kvcache.policies import ORDERS
from hmt.kvcache.stepped import SteppedKV
from hmt.kvcache.tiered import TieredKV

__all__ = [
    "ORDERS",
    "AnyKV",
    "PagedKV",
    "PlacedKV",
    "SteppedKV",
    "TieredKV",
    "encoding_of",
    "group_bytes_as",
    "kv_sizes",
    "open_tiered",
    "page_bytes",
]
