"""Statistics of the inputs of a layer's linear layers, over all calibration sequences."""

from collections.abc import Callable, Mapping

from hmt.quant.methods.interface import Needs
from hmt.quantizing.changes import Changes
from hmt.quantizing.hidden_states import HiddenStates
from hmt.quantizing.observed import Observer
from hmt.quantizing.statistics import Collector
from hmt.quantizing.stores import LayerWeights
from hmt.quantizing.structure import ParamId
from hmt.weights import WeightStore


def collect(
    hidden: HiddenStates,
    layer: int,
    inputs: Mapping[ParamId, int],
    needs: Needs,
    store: WeightStore,
    changes: Changes,
    done: Callable[[], None],
) -> dict[ParamId, Collector]:
    """Compute `layer` and collect what comes to `inputs`, each of so many numbers.

    Nothing is computed where nothing is wanted.  done   is called after each step
    """
    where = changes.where
    found = {place: Collector(needs, columns, where) for place, columns in inputs.items()}
    if found:
        observer = Observer(found.__contains__, lambda place, given: found[place].add(given))
        weights = LayerWeights(store, observer=observer, changes=changes)
        hidden.observe(layer, weights, observer, done)
    return found
