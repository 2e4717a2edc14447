"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.pages import page_bytes
from hmt.kvcache.placed import PlacedKV
from hmt.kvcache.tiered import TieredKV

__all__ = ["PagedKV", "PlacedKV", "TieredKV", "page_bytes"]
