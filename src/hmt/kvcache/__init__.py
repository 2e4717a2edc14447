"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.opening import kv_sizes, open_tiered, page_bytes_as
from hmt.kvcache.pages import page_bytes
from hmt.kvcache.placed import PlacedKV
from hmt.kvcache.policies import ORDERS
from hmt.kvcache.tiered import TieredKV

# Whatever keeps sequences of keys and values.
AnyKV = PagedKV | PlacedKV | TieredKV

__all__ = [
    "ORDERS",
    "AnyKV",
    "PagedKV",
    "PlacedKV",
    "TieredKV",
    "kv_sizes",
    "open_tiered",
    "page_bytes",
    "page_bytes_as",
]
