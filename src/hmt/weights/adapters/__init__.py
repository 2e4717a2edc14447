"""Low-rank adapters of a model: what they change, which are in memory, and weights with them."""

from hmt.weights.adapters.binding import BoundAdapter, bind_adapter, is_adapted
from hmt.weights.adapters.store import AdapterHold, AdapterStore
from hmt.weights.adapters.view import AdapterViews
