"""Which pages are worth being near."""

from hmt.kvcache.policies.choice import ORDERS
from hmt.kvcache.policies.interface import PagePolicy
from hmt.kvcache.policies.scores import (
    AttentionDecayed,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)

__all__ = ["ORDERS", "AttentionDecayed", "LeastFrequentlyUsed", "LeastRecentlyUsed", "PagePolicy"]
