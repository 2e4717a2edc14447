"""Cache policies: which cached block goes when a slot is needed.  One file, one policy."""

from hmt.weights.policies.choice import POLICIES, open_policy
from hmt.weights.policies.decayed import DecayedScore
from hmt.weights.policies.heat import Heat
from hmt.weights.policies.interface import EvictionPolicy, Surroundings
from hmt.weights.policies.lfu import LFU
from hmt.weights.policies.lru import LRU
from hmt.weights.policies.lru2 import LRU2
from hmt.weights.policies.scan import DenseByScan
from hmt.weights.policies.weight_aware import WeightAwareLRU

__all__ = [
    "LFU",
    "LRU",
    "LRU2",
    "POLICIES",
    "DecayedScore",
    "DenseByScan",
    "EvictionPolicy",
    "Heat",
    "Surroundings",
    "WeightAwareLRU",
    "open_policy",
]
