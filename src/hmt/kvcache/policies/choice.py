"""Policies by name."""

from collections.abc import Callable

from hmt.kvcache.policies.interface import PagePolicy
from hmt.kvcache.policies.scores import (
    AttentionDecayed,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)

ORDERS: dict[str, Callable[[int], PagePolicy]] = {
    "a2cr": AttentionDecayed,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
}
