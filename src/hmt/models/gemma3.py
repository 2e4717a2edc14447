"""Gemma 3, the text models (arXiv 2503.19786)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import FusableLayer, GatedFFN, ResidualFFN, RMSNorm
from hmt.models.config import (
    Config,
    activation,
    attention,
    divided,
    head_dim,
    require,
    rotary,
    windows,
)
from hmt.models.decoder import Decoder, attention_block, ffn_block


class Gemma3(Decoder):
    """Norms around attention and FFN; most layers see a window and turn by a shorter base.

    Norm weights are centred on zero, embeddings are scaled by sqrt(hidden_size), query and key
    heads are normed before rotation, the FFN is gated by a GELU.
    """

    divides = ("heads", "width")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "use_bidirectional_attention", False, None)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        layers = list(zip(config.layer_types, windows(config), strict=False))
        turned_by = {kind: rotary(config, kind) for kind, _ in layers}
        self.attention = [
            attention(
                config,
                turned_by[kind],
                window=window,
                scale=config.query_pre_attn_scalar**-0.5,
                norm=self.norm,
                softcap=config.attn_logit_softcapping or 0.0,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norm=RMSNorm(head_dim(config), config.rms_norm_eps, offset=1.0),
            )
            for kind, window in layers
        ]
        gated = GatedFFN(
            config.hidden_size,
            config.intermediate_size,
            activation(config, "hidden_activation"),
            share=divided(config, "width"),
        )
        self.ffn = ResidualFFN(gated, self.norm, post_norm=True)
        # Rounded to the dtype of activations: in bf16, sqrt(3840) is 62.0, as it was in training.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[layer.kv for layer in self.attention],
            activation_width=max(self.attention[0].activation_width, self.ffn.activation_width),
            logit_softcap=config.final_logit_softcapping,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention[index].params(f"{at}self_attn."),
            self.norm.param("post_norm", f"{at}post_attention_layernorm.weight"),
        )
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}pre_feedforward_layernorm.weight"),
            *self.ffn.ffn.params(f"{at}mlp."),
            self.norm.param("post_norm", f"{at}post_feedforward_layernorm.weight"),
        )

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        return super().embed(step, weights) * self.embedding_scale

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(self.attention[index], self.ffn, post_norm=self.norm)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention[index](hidden, index, step, params, kv)
            x = self.norm(x, params["post_norm"])
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return self.ffn(hidden, x, params)
