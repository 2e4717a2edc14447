"""Bamba: Mamba-2 in most layers, attention in the others, dense networks behind them."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockSpec
from hmt.layers import Mamba2, ResidualFFN
from hmt.models.config import Config, attention, gated_ffn, layer_kinds, norm, rotary
from hmt.models.decoder import ffn_block
from hmt.models.hybrid import Hybrid, caches_by_layer
from hmt.models.state_space.sizes import mamba2


class Bamba(Hybrid):
    """Attention turns half of each head."""

    recurrent: Mamba2

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        bias = config.attention_bias
        self.attention = attention(config, rotary(config), bias=bias, output_bias=bias)
        self.recurrent = mamba2(config, self.norm, int(config.mamba_expand * config.hidden_size))
        self.ffn = ResidualFFN(gated_ffn(config, bias=config.mlp_bias), self.norm)
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = [False] * len(kinds)
        parts = (self.attention, self.recurrent, self.ffn)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="model.final_layernorm.weight",
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(part.activation_width for part in parts),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield self.mixer_block(index, "mamba")
        norm = self.norm.param("norm", f"{at}pre_ff_layernorm.weight")
        yield ffn_block(index, norm, *self.ffn.ffn.params(f"{at}feed_forward."))
