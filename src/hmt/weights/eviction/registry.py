"""Policies by name."""

from collections.abc import Callable, Mapping

from hmt.base.errors import ConfigError
from hmt.weights.eviction.dense_scan import DenseByScan
from hmt.weights.eviction.heat import Heat
from hmt.weights.eviction.interface import EvictionPolicy
from hmt.weights.eviction.lru import LRU

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"heat": Heat, "lru": LRU}


def open_policy(name: str) -> EvictionPolicy:
    """The policy `name` for experts, and a scan for dense blocks.

    Raises ConfigError for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache policy {name!r} is not one of {', '.join(POLICIES)}")
    return DenseByScan(POLICIES[name]())
