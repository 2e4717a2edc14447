"""OLMo Hybrid: gated delta nets in most layers, attention as OLMo 2's in the others."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockSpec
from hmt.layers import DeltaAttention, NoRotary, PostNormAttention, ResidualFFN, Rotary
from hmt.models.config import (
    Config,
    attention,
    gated_ffn,
    head_dim,
    layer_kinds,
    norm,
    require,
    rotary,
)
from hmt.models.decoder import attention_block, ffn_block
from hmt.models.hybrid import Hybrid, caches_by_layer, convolution_taps, renamed
from hmt.models.linear_attention.qwen3_next import delta_heads

_OUT_EPS = 1e-5  # of the norm of delta nets' results, whatever the configuration says
# transformers writes all norms but one under other names than were published.
_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


class OlmoHybrid(Hybrid):
    """Delta nets and their networks have norms before them, attention and its networks after."""

    attention: PostNormAttention
    recurrent: DeltaAttention

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        self.norm = norm(config)
        if config.rope_parameters.get("rope_theta") is None:
            config.rope_parameters = None
            turned_by: Rotary = NoRotary(head_dim(config), config.max_position_embeddings)
        else:
            turned_by = rotary(config)
        bias = config.attention_bias
        self.attention = PostNormAttention(
            attention(config, turned_by, bias=bias, output_bias=bias)
        )
        self.recurrent = DeltaAttention(
            config.hidden_size,
            delta_heads(config, most_rate=2.0 if config.linear_allow_neg_eigval else 1.0),
            self.norm,
            convolution_taps(config, "linear_conv_kernel_dim"),
            _OUT_EPS,
            "silu",
            "a",
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = [False] * config.num_hidden_layers
        self.ffn = ResidualFFN(gated_ffn(config), self.norm)
        self.normed_ffn = ResidualFFN(gated_ffn(config), self.norm, pre_norm=False, post_norm=True)
        parts = (self.attention, self.recurrent, self.ffn)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(part.activation_width for part in parts),
        )

    @override
    def network(self, index: int) -> ResidualFFN:
        return self.normed_ffn if self.attends[index] else self.ffn

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        first = self.norm.param("norm", f"{at}input_layernorm.weight")
        second = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        last = self.norm.param("post_norm", f"{at}post_feedforward_layernorm.weight")
        if self.attends[index]:
            first, second = second, last
            mixer = self.attention.params(f"{at}self_attn.")
        else:
            mixer = self.recurrent.params(f"{at}linear_attn.")
        first, second = renamed((first, second), _NORMS, also=True)
        yield attention_block(index, first, *mixer)
        yield ffn_block(index, second, *self.ffn.ffn.params(f"{at}mlp."))
