"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.pages import page_bytes

__all__ = ["PagedKV", "page_bytes"]
