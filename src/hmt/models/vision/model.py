"""A language model that computes from images' features in the place of tokens' embeddings."""

from torch import Tensor
from typing_extensions import override

from hmt.contracts.adapter import StepAdapters
from hmt.contracts.model import FusedLayers, Model
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.models.decoder import Decoder
from hmt.models.forwarding import ForwardingModel
from hmt.models.vision.encoder import Encoder


class VisionModel(ForwardingModel[Model]):
    """The language model of one that sees.

    Of steps without images it computes what that does.
    """

    def __init__(self, base: Model, encoder: Encoder) -> None:
        super().__init__(base, base.spec)
        self.encoder = encoder
        self._replaces = not isinstance(base, Decoder)  # in front of what it makes of embeddings

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        hidden = self._base.embed(step, weights)
        if step.image_rows is None or step.image_features is None or self._replaces:
            return hidden
        rows = step.image_features.to(hidden.device, hidden.dtype)
        rows = rows.repeat(1, hidden.shape[1] // rows.shape[1])  # streams that begin alike
        return hidden.index_copy(0, step.image_rows.to(hidden.device), rows)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        hidden = self._base.layer(index, hidden, step, weights, kv)
        if self._replaces or index >= len(step.layer_features) or step.image_rows is None:
            return hidden
        rows = step.layer_features[index].to(hidden.device, hidden.dtype)
        return hidden.index_add(0, step.image_rows.to(hidden.device), rows)

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        fused = self._base.fused_layers(layers, weights, kv)
        return None if fused is None else _WithoutAdded(fused)


class _WithoutAdded(FusedLayers):
    """Layers in one call, but for steps in which something is added between them.

    And those in which tokens see later ones.
    """

    def __init__(self, fused: FusedLayers) -> None:
        self._fused = fused

    @property
    @override
    def expert_uses(self):  # type: ignore[no-untyped-def]
        return self._fused.expert_uses

    @override
    def __call__(self, hidden: Tensor, step: Step, adapters: StepAdapters | None = None) -> bool:
        usual = not step.layer_features and not step.has_blocks
        return usual and self._fused(hidden, step, adapters)
