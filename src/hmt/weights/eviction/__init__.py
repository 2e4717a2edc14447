"""Cache policies: which cached block goes when a slot is needed.  One file, one policy."""

from hmt.weights.eviction.a2cr import DecayedScore
from hmt.weights.eviction.dense_scan import DenseByScan
from hmt.weights.eviction.heat import Heat
from hmt.weights.eviction.interface import EvictionPolicy, PolicyContext
from hmt.weights.eviction.lfu import LFU
from hmt.weights.eviction.lru import LRU
from hmt.weights.eviction.lru2 import LRU2
from hmt.weights.eviction.registry import POLICIES, open_policy
from hmt.weights.eviction.weight_aware_lru import WeightAwareLRU

__all__ = [
    "LFU",
    "LRU",
    "LRU2",
    "POLICIES",
    "DecayedScore",
    "DenseByScan",
    "EvictionPolicy",
    "Heat",
    "PolicyContext",
    "WeightAwareLRU",
    "open_policy",
]
