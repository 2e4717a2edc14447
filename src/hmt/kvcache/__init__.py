"""Keys and values: pages, sequences, and attention over them."""

from hmt.kvcache.cache import PagedKV
from hmt.kvcache.pages import PAGE_TOKENS, page_bytes

__all__ = ["PAGE_TOKENS", "PagedKV", "page_bytes"]
