"""Parameters: which bytes they are, how they lie in memory, and the store that moves them."""

from hmt.weights.binding import BoundBlock, BoundParam, BoundPart, bind, published_bytes
from hmt.weights.device_store import DeviceCounters, DeviceWeights, inner_homes
from hmt.weights.expectations import GuessCounters, StoreCounters
from hmt.weights.layout import BlockLayout, lay_out
from hmt.weights.naming import Named, named
from hmt.weights.policies import POLICIES, EvictionPolicy, Surroundings, open_policy
from hmt.weights.rows import row_span_bytes
from hmt.weights.spill import SpillFile
from hmt.weights.store import WeightStore
from hmt.weights.teams import laid_out_alike

__all__ = [
    "POLICIES",
    "BlockLayout",
    "BoundBlock",
    "BoundParam",
    "BoundPart",
    "DeviceCounters",
    "DeviceWeights",
    "EvictionPolicy",
    "GuessCounters",
    "Named",
    "SpillFile",
    "StoreCounters",
    "Surroundings",
    "WeightStore",
    "bind",
    "inner_homes",
    "laid_out_alike",
    "lay_out",
    "named",
    "open_policy",
    "published_bytes",
    "row_span_bytes",
]
