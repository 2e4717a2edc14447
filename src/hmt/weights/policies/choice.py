"""Policies by name."""

from collections.abc import Callable, Mapping

from hmt.base.errors import ConfigError
from hmt.weights.policies.decayed import DecayedScore
from hmt.weights.policies.heat import Heat
from hmt.weights.policies.interface import EvictionPolicy, Surroundings
from hmt.weights.policies.lfu import LFU
from hmt.weights.policies.lru import LRU
from hmt.weights.policies.lru2 import LRU2
from hmt.weights.policies.scan import DenseByScan
from hmt.weights.policies.weight_aware import WeightAwareLRU

HALF_LIFE = 16.0  # steps: the best of 4 to 128, on recorded and on synthetic traces

POLICIES: Mapping[str, Callable[[Surroundings], EvictionPolicy]] = {
    "lru": lambda around: LRU(),
    "lfu": lambda around: LFU(),
    "lru2": lambda around: LRU2(),
    "wa-lru": WeightAwareLRU,
    "heat": lambda around: Heat(HALF_LIFE),
    "a2cr": DecayedScore,
}


def open_policy(name: str, around: Surroundings) -> EvictionPolicy:
    """The policy `name` for experts, and a scan for dense blocks.

    Raises ConfigError for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache policy {name!r} is not one of {', '.join(POLICIES)}")
    return DenseByScan(POLICIES[name](around))
