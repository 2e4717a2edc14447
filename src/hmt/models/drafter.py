"""Models that draft for another: a family's layers behind an embedding of their own."""

from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.contracts.model import FusedLayers, Model, ModelSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.models.decoder import Decoder


class Drafter(Model):
    """A model that computes what `base` does; subclasses say what differs.

    Their steps carry hidden states as `Step.inputs`.
    """

    def __init__(self, base: Decoder, spec: ModelSpec) -> None:
        """`base` is changed: it has the blocks of `spec` from now on."""
        self._base = base
        self.dtype = base.dtype
        self.spec = base.spec = spec

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        return self._base.layer(index, hidden, step, weights, kv)

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        return self._base.fused_layers(layers, weights, kv)

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        return self._base.normed(hidden, weights)

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return self._base.head(hidden, weights)

    @override
    def angles(self, step: Step) -> tuple[int, ...]:
        return self._base.angles(step)

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        return self._base.expected_experts(index, hidden, weights)

    @override
    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        return self._base.layer_blocks(index)
