"""What Mamba and Mamba-2 share: a state space in every layer, and nothing else."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import Mamba, Mamba2, RMSNorm
from hmt.models.config import Config
from hmt.models.decoder import Decoder, attention_block


class StateSpaceDecoder(Decoder):
    """No layer keeps KV, so that a sequence takes the same memory however long it is."""

    def __init__(
        self, config: Config, dtype: torch.dtype, norm: RMSNorm, recurrent: Mamba | Mamba2
    ) -> None:
        layers = config.num_hidden_layers
        self.norm, self.recurrent = norm, recurrent
        super().__init__(
            config,
            dtype,
            norm=norm,
            norm_name="backbone.norm_f.weight",
            table_name="backbone.embeddings.weight",
            kv=[None] * layers,
            state=[recurrent.state] * layers,
            activation_width=recurrent.activation_width,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"backbone.layers.{index}."
        norm = self.norm.param("norm", f"{at}norm.weight")
        yield attention_block(index, norm, *self.recurrent.params(f"{at}mixer."))

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            return hidden + self.recurrent(hidden, index, step, params, kv)
