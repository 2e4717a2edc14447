"""Who listens to a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hmt.contracts.adapter import StepAdapters
from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import FusedLayers, Model
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.weights import RouterObserver


class StepObserver(RouterObserver, Protocol):
    """Hears what happens in a step.  Tensors are valid during the call only, and must not change.

    What it costs is part of the step, so it should be little.
    """

    def layer_ended(self, index: int, hidden: torch.Tensor) -> None:
        """Layer `index` has been computed: hidden [tokens, hidden_size] goes into the next one."""
        ...


class ObservedModel:
    """Implements Model; tells `observers` when a layer has ended."""

    def __init__(self, model: Model, observers: Sequence[StepObserver]) -> None:
        self._model = model
        self._observers = observers
        self.spec = model.spec
        self.dtype = model.dtype
        self.embed = model.embed
        self.head = model.head
        self.normed = model.normed
        self.layer_blocks = model.layer_blocks
        self._sparse = {b.id.layer for b in model.spec.blocks if b.id.kind is BlockKind.EXPERT}
        self.expected_experts = model.expected_experts
        self.angles = model.angles
        self.encoder = model.encoder
        self.notes = model.notes

    def layer(
        self, index: int, hidden: torch.Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> torch.Tensor:
        """See Model."""
        hidden = self._model.layer(index, hidden, step, weights, kv)
        self._layer_ended(index, hidden)
        return hidden

    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        """See Model.  None for layers with experts: their routers could not be heard."""
        if not self._sparse.isdisjoint(layers):
            return None
        inner = self._model.fused_layers(layers, weights, kv)
        if inner is None:
            return None

        return _ObservedLayers(inner, lambda hidden: self._layer_ended(layers[-1], hidden))

    def _layer_ended(self, index: int, hidden: torch.Tensor) -> None:
        for observer in self._observers:
            observer.layer_ended(index, hidden)


class _ObservedLayers:
    """Implements FusedLayers for layers without experts."""

    expert_uses: Mapping[int, Sequence[int]] = {}

    def __init__(self, layers: FusedLayers, ended: Callable[[torch.Tensor], None]) -> None:
        self._layers = layers
        self._ended = ended

    def __call__(
        self, hidden: torch.Tensor, step: Step, adapters: StepAdapters | None = None
    ) -> bool:
        computed = self._layers(hidden, step, adapters)
        if computed:
            self._ended(hidden)
        return computed
