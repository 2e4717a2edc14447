"""Jamba: Mamba in most layers, attention in the others, experts in some (arXiv 2403.19887)."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockSpec
from hmt.layers import Mamba, NoRotary, ResidualFFN, SoftmaxRouter
from hmt.models.config import (
    Config,
    attention,
    check_experts,
    gated_ffn,
    head_dim,
    layer_kinds,
    norm,
    require,
)
from hmt.models.decoder import expert_block, ffn_block, router_block
from hmt.models.hybrid import Hybrid, caches_by_layer, convolution_taps


class Jamba(Hybrid):
    """Attention knows no positions."""

    recurrent: Mamba
    router: SoftmaxRouter

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        hidden = config.hidden_size
        self.norm = norm(config)
        turning = NoRotary(head_dim(config), config.max_position_embeddings)
        self.attention = attention(config, turning)
        self.recurrent = Mamba(
            hidden,
            int(config.mamba_expand * hidden),
            config.mamba_d_state,
            int(config.mamba_dt_rank),
            self.norm,
            convolution_taps(config, "mamba_d_conv"),
            eps=config.rms_norm_eps,
            weighted=True,
            bias=config.mamba_proj_bias,
            conv_bias=config.mamba_conv_bias,
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = [experts > 1 for experts in config.layers_num_experts]
        self.ffn = ResidualFFN(gated_ffn(config), self.norm)
        parts = (self.attention, self.recurrent, self.ffn)
        widths = [part.activation_width for part in parts]
        if any(self.sparse):
            check_experts(config, config.num_experts)
            top_k = config.num_experts_per_tok
            self.router = SoftmaxRouter(hidden, config.num_experts, top_k, renormalise=False)
            self.expert = gated_ffn(config)
            widths.append(self.expert.activation_width + hidden)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="model.final_layernorm.weight",
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(widths),
            router=self.router if any(self.sparse) else None,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield self.mixer_block(index, "mamba")
        norm, at = self.norm.param("norm", f"{at}pre_ff_layernorm.weight"), f"{at}feed_forward."
        if not self.sparse[index]:
            yield ffn_block(index, norm, *self.ffn.ffn.params(at))
            return
        yield router_block(index, norm, *self.router.params(f"{at}router"))
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}experts.{expert}."))
