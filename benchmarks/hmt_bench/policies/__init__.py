"""Eviction policies that replays compare: the engine's own, and those that lost to them."""

from hmt_bench.policies.a2cr import DecayedScore
from hmt_bench.policies.context import PolicyContext
from hmt_bench.policies.lfu import LFU
from hmt_bench.policies.lru2 import LRU2
from hmt_bench.policies.registry import POLICIES
from hmt_bench.policies.weight_aware_lru import WeightAwareLRU

__all__ = ["LFU", "LRU2", "POLICIES", "DecayedScore", "PolicyContext", "WeightAwareLRU"]
