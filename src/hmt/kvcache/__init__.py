"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.pages import page_bytes
from hmt.kvcache.placed import PlacedKV

__all__ = ["PagedKV", "PlacedKV", "page_bytes"]
