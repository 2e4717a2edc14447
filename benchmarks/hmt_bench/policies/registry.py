"""Policies by name."""

from collections.abc import Callable, Mapping

from hmt.weights import eviction
from hmt.weights.eviction import EvictionPolicy
from hmt_bench.policies.a2cr import DecayedScore
from hmt_bench.policies.context import PolicyContext
from hmt_bench.policies.lfu import LFU
from hmt_bench.policies.lru2 import LRU2
from hmt_bench.policies.weight_aware_lru import WeightAwareLRU

POLICIES: Mapping[str, Callable[[PolicyContext], EvictionPolicy]] = {
    "lru": lambda around: eviction.POLICIES["lru"](),
    "lfu": lambda around: LFU(),
    "lru2": lambda around: LRU2(),
    "wa-lru": WeightAwareLRU,
    "heat": lambda around: eviction.POLICIES["heat"](),
    "a2cr": DecayedScore,
}
