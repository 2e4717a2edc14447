"""Policies by name."""

from collections.abc import Callable, Mapping

from hmt.base.errors import ConfigError
from hmt.weights.eviction.a2cr import DecayedScore
from hmt.weights.eviction.dense_scan import DenseByScan
from hmt.weights.eviction.heat import Heat
from hmt.weights.eviction.interface import EvictionPolicy, PolicyContext
from hmt.weights.eviction.lfu import LFU
from hmt.weights.eviction.lru import LRU
from hmt.weights.eviction.lru2 import LRU2
from hmt.weights.eviction.weight_aware_lru import WeightAwareLRU

HALF_LIFE = 16.0  # steps: the best of 4 to 128, on recorded and on synthetic traces

POLICIES: Mapping[str, Callable[[PolicyContext], EvictionPolicy]] = {
    "lru": lambda around: LRU(),
    "lfu": lambda around: LFU(),
    "lru2": lambda around: LRU2(),
    "wa-lru": WeightAwareLRU,
    "heat": lambda around: Heat(HALF_LIFE),
    "a2cr": DecayedScore,
}


def open_policy(name: str, around: PolicyContext) -> EvictionPolicy:
    """The policy `name` for experts, and a scan for dense blocks.

    Raises ConfigError for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache policy {name!r} is not one of {', '.join(POLICIES)}")
    return DenseByScan(POLICIES[name](around))
