"""Policies by name."""

from collections.abc import Callable

from hmt.kvcache.eviction.interface import PageEvictionPolicy
from hmt.kvcache.eviction.page_scores import (
    AttentionDecayed,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)

KV_EVICTION: dict[str, Callable[[int], PageEvictionPolicy]] = {
    "a2cr": AttentionDecayed,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
}
