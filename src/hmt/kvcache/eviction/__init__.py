"""Which pages are worth being near."""

from hmt.kvcache.eviction.interface import PageEvictionPolicy
from hmt.kvcache.eviction.page_scores import (
    AttentionDecayed,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from hmt.kvcache.eviction.registry import KV_EVICTION

__all__ = [
    "KV_EVICTION",
    "AttentionDecayed",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "PageEvictionPolicy",
]
