"""Which pages are worth being near."""

from hmt.kvcache.eviction.interface import PageEvictionPolicy
from hmt.kvcache.eviction.page_scores import AttentionDecayed
from hmt.kvcache.eviction.registry import KV_EVICTION
