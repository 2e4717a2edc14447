"""A model around another one, which computes all that a subclass does not."""

from typing import Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.contracts.model import FusedLayers, Model, ModelSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights

Inner = TypeVar("Inner", bound=Model)


class ForwardingModel(Model, Generic[Inner]):
    """Implements Model by asking another one."""

    def __init__(self, base: Inner, spec: ModelSpec) -> None:
        self._base = base
        self.spec, self.dtype = spec, base.dtype

    @override
    def notes(self) -> tuple[str, ...]:
        return self._base.notes()

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        return self._base.embed(step, weights)

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
