"""A layer's changes: its rotation, known beforehand, and factors that its activations give."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import TRUNK
from hmt.kernels import ops
from hmt.quant.methods.interface import Scaling, Statistics, Target
from hmt.quantizing.changes import Changes, fold
from hmt.quantizing.collecting import collect
from hmt.quantizing.hidden_states import HiddenStates
from hmt.quantizing.job import Job
from hmt.quantizing.source_tensors import numbers
from hmt.quantizing.statistics import nbytes as statistics_bytes
from hmt.quantizing.stores import on_device
from hmt.quantizing.structure import Folding, ParamId, foldings
from hmt.quantizing.units import LayerWork
from hmt.weights import WeightStore


@dataclass(frozen=True, slots=True)
class Scaled:
    """A folding, and what is known of it.

    input     where what the weights behind are multiplied with is seen
    columns   numbers of that
    targets   forms of weights behind that are rounded
    """

    folding: Folding
    input: ParamId
    columns: int
    targets: Mapping[ParamId, Target]


def scale_layer(
    job: Job,
    work: LayerWork,
    most: int,
    hidden: HiddenStates,
    store: WeightStore,
    changes: Changes,
    done: Callable[[], None],
) -> None:
    """Add the factors to `changes` that go from a layer's activations into its weights, or back.

    most   bytes of statistics that are held at once
    done   is called after each step
    """
    scaling = job.procedure.scaling
    assert scaling is not None
    for group in _foldings(job, work, scaling, most):
        inputs = {scaled.input: scaled.columns for scaled in group}
        found = collect(hidden, work.index, inputs, scaling.needs, store, changes, done)
        for scaled in group:
            statistics = found[scaled.input].result()
            if statistics.tokens:
                _scale(scaling, scaled, statistics, store, changes)


def _foldings(job: Job, work: LayerWork, scaling: Scaling, most: int) -> list[list[Scaled]]:
    """Those of a layer that matter, in groups of which the statistics take `most` bytes."""
    spec = job.model.spec
    blocks = [block for block in spec.blocks if block.id.layer == work.index]
    columns = {ParamId(b.id, p.name): p.shape[-1] for b in blocks for p in b.params}
    targets = {place: unit.target for unit in work.units for place in unit.places}
    groups: list[list[Scaled]] = []
    held = 0
    for folding in foldings(spec.architecture, blocks):
        rounded = {place: targets[place] for place in folding.behind if place in targets}
        if not rounded:
            continue
        first = folding.behind[0]
        size = statistics_bytes(scaling.needs, columns[first])
        if not groups or held + size > most:
            groups.append([])
            held = 0
        held += size
        groups[-1].append(Scaled(folding, first, columns[first], rounded))
    return groups


def _scale(
    scaling: Scaling, scaled: Scaled, inputs: Statistics, store: WeightStore, changes: Changes
) -> None:
    """Find the factors of one folding, and add them to `changes`."""

    def weights() -> Generator[tuple[Tensor, Target]]:
        for place, target in scaled.targets.items():
            with store.lease(place.block) as params:
                weight = on_device(params[place.name], changes.where)
                yield changes.of(place, ops.dequantize(weight, torch.float32)), target

    with closing(weights()) as behind:  # what is leased is given back where this is ended
        factors = scaling.factors(inputs, behind)
    with store.lease(scaled.folding.before.block) as params:
        fold(changes, scaled.folding, factors, {name: w.data for name, w in params.items()})


def layer_changes(job: Job, layer: int, store: WeightStore) -> Changes:
    """What is known of a layer before its activations are."""
    changes = Changes(job.where)
    if job.rotation is None:
        return changes
    norms = {}
    for place in job.rotation.norms(layer):
        with store.lease(place.block) as params:
            norms[place] = params[place.name].data.float().clone()
    return job.rotation.layer(layer, norms, changes)


def trunk_changes(job: Job) -> Changes:
    """What becomes of what belongs to no layer."""
    changes = Changes(job.where)
    if job.rotation is None:
        return changes
    norms = {}
    trunk = job.works[-1]
    for record in trunk.copied:
        for place in trunk.places.get(record.name, ()):
            if place in job.rotation.norms(TRUNK):
                norms[place] = numbers(record).float()
    return job.rotation.trunk(norms, changes)
