"""DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5: DeepSeek-V3 whose tokens attend to a selection."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import ParamSpec
from hmt.contracts.model import ModelSpec
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.layers import Indexer, Params, Selection, SparseLatentAttention
from hmt.models.config import Config, layer_kinds, rotary
from hmt.models.deepseek.dense import DeepSeekV3

_NOT_CAPTURED = "an indexer selects what tokens attend to, and each step gathers other rows"


def selecting(
    spec: ModelSpec, attention: SparseLatentAttention, indexes: Sequence[bool]
) -> ModelSpec:
    """`spec` of a model whose latent layers attend to a selection; `indexes`: has an indexer."""
    keys = attention.indexer.keys
    return replace(
        spec,
        kv=tuple(None if layer is None else attention.kv for layer in spec.kv),
        index_keys=tuple(keys if own else None for own in indexes),
        activation_width=spec.activation_width + attention.indexer.activation_width,
        gathered_width=attention.gathered_width,
        uncaptured=_NOT_CAPTURED,
    )


class DeepSeekV32(DeepSeekV3):
    """Each token attends to `index_topk` positions at most, which the layer's indexer selects."""

    staged = False

    _interleaved = False  # pairs of an indexer's numbers that turn together lie side by side

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        if config.q_lora_rank is None:
            raise CheckpointError(
                "q_lora_rank is None; the indexer of this family reads compressed queries"
            )
        if config.index_head_dim < config.qk_rope_head_dim:
            raise CheckpointError(
                f"index_head_dim is {config.index_head_dim}, but {config.qk_rope_head_dim} numbers "
                "of it turn by qk_rope_head_dim"
            )
        self._indexer = Indexer(
            config.hidden_size,
            config.q_lora_rank,
            config.index_n_heads,
            config.index_head_dim,
            config.qk_rope_head_dim,
            config.index_topk,
            rotary(config),
            self._interleaved,
        )
        self._indexes = self._indexing_layers(config)
        super().__init__(config, dtype)
        self._selecting = SparseLatentAttention(self.attention, self._indexer)
        self.spec = selecting(self.spec, self._selecting, self._indexes)
        # Of the last step's last layer with an indexer, for layers without one behind it.
        self._last: tuple[tuple[Segment, ...], Selection] = ((), ())

    def _indexing_layers(self, config: Config) -> list[bool]:
        """Which layers have an indexer; the others use the selection of the last one before."""
        return [True] * config.num_hidden_layers

    @override
    def attention_params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        own = self._indexer.params(f"{at}indexer.") if self._indexes[index] else ()
        return (*self.attention.params(at), *own)

    @override
    def mix(self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache) -> Tensor:
        selection = None
        if not self._indexes[index]:
            runs, selection = self._last
            assert runs is step.segments, "layers of a step are computed in order"
        keys = self.spec.index_layer(index)
        x, selection = self._attend(hidden, index, keys, step, params, kv, selection)
        self._last = step.segments, selection
        return x

    def _attend(
        self,
        hidden: Tensor,
        index: int,
        keys: int,
        step: Step,
        params: Params,
        kv: KVCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        """Attention to the norm of hidden, and what was selected; `selection` as it is given."""
        x = self.norm(hidden, params["norm"])
        return self._selecting(x, index, keys, step, params, kv, selection)


class GlmMoeDsa(DeepSeekV32):
    """As DeepSeek-V3.2, but some layers use what an earlier one selected (arXiv 2603.12201)."""

    _interleaved = True

    @override
    def _indexing_layers(self, config: Config) -> list[bool]:
        kinds = layer_kinds(config, "full", "shared", name="indexer_types")
        if kinds[0] != "full":
            raise CheckpointError(
                f"indexer_types begins with {kinds[0]!r}; the first layer has nothing to share"
            )
        return [kind == "full" for kind in kinds]
