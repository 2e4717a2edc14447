"""Cache policies: which cached block goes when a slot is needed.  One file, one policy.

`benchmarks/hmt_bench/policies` has others, which replays of recorded traces compare with these.
"""

from hmt.weights.eviction.dense_scan import DenseByScan
from hmt.weights.eviction.heat import Heat
from hmt.weights.eviction.interface import EvictionPolicy
from hmt.weights.eviction.lru import LRU
from hmt.weights.eviction.registry import POLICIES, open_policy
