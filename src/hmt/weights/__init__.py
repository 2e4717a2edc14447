"""Parameters: which bytes they are, how they lie in memory, and the store that moves them."""

from hmt.weights.binding import bind, published_bytes
from hmt.weights.eviction import POLICIES, EvictionPolicy, open_policy
from hmt.weights.experts.moe_backends import experts_alike_by_layer
from hmt.weights.layout import BlockLayout, lay_out, with_int8_activations
from hmt.weights.naming import named
from hmt.weights.precise_view import PreciseView
from hmt.weights.sharding import bind_share, cut_packed, units_of
from hmt.weights.store.block_store import WeightStore
from hmt.weights.store.device_encoder import DeviceEncoder
from hmt.weights.store.device_state import DeviceCounters
from hmt.weights.store.device_store import DeviceWeights
from hmt.weights.store.row_reader import row_span_bytes
from hmt.weights.store.spill import SpillFile
from hmt.weights.store.split_weights import SplitWeights
from hmt.weights.view import RouterObserver, WeightsView
