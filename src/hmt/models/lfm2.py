"""LFM2: short convolutions in most layers, attention in the others (arXiv 2511.23404)."""

from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockSpec
from hmt.layers import (
    Attention,
    GatedFFN,
    ResidualFFN,
    RMSNorm,
    ShortConv,
    SigmoidRouter,
)
from hmt.models.config import Config, check_experts, head_dim, layer_kinds, require, rotary
from hmt.models.decoder import attention_block, expert_block, ffn_block, router_block
from hmt.models.hybrid import Hybrid, caches_by_layer, convolution_taps, renamed

_NAMES = ("w1", "w3", "w2")
_RENAMED = {".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm.", ".o_proj.": ".out_proj."}


class ConvHybrid(Hybrid):
    """What LFM2 and LFM2-MoE share: a convolution or attention, then a network or experts."""

    recurrent: ShortConv
    router: SigmoidRouter

    def __init__(
        self, config: Config, dtype: torch.dtype, *, ffn_width: int, sparse: Sequence[bool]
    ) -> None:
        """`sparse`: which layers have experts."""
        require(config, "conv_bias", False)
        hidden, dim = config.hidden_size, head_dim(config)
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.attention = Attention(
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
            rotary(config),
            self.norm,
            dim**-0.5,
            head_norm=RMSNorm(dim, config.norm_eps),
        )
        taps = convolution_taps(config, "conv_L_cache")
        self.recurrent = ShortConv(hidden, self.norm, taps)
        kinds = layer_kinds(config, "full_attention", "conv")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = list(sparse)
        self.ffn = ResidualFFN(GatedFFN(hidden, ffn_width, "silu"), self.norm)
        parts = [self.attention.activation_width, self.recurrent.activation_width]
        parts += [self.ffn.activation_width] * (not all(sparse))
        router = self._experts(config) if any(sparse) else None
        if router is not None:
            parts.append(self.expert.activation_width + hidden)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="model.embedding_norm.weight",
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(parts),
            router=router,
        )

    def _experts(self, config: Config) -> SigmoidRouter:
        """Set up what layers with experts have."""
        check_experts(config, config.num_experts)
        self.router = SigmoidRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.use_expert_bias,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        self.expert = GatedFFN(config.hidden_size, config.moe_intermediate_size, "silu")
        return self.router

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        norm = self.norm.param("norm", f"{at}operator_norm.weight")
        if self.attends[index]:
            mixer = renamed(self.attention.params(f"{at}self_attn."), _RENAMED)
        else:
            mixer = self.recurrent.params(f"{at}conv.")
        yield attention_block(index, norm, *mixer)
        norm, at = self.norm.param("norm", f"{at}ffn_norm.weight"), f"{at}feed_forward."
        if not self.sparse[index]:
            yield ffn_block(index, norm, *self.ffn.ffn.params(at, _NAMES))
            return
        yield router_block(index, norm, *self.router.params(at))
        for expert in range(self.router.experts):
            own = self.expert.params(f"{at}experts.{expert}.", _NAMES)
            yield expert_block(index, expert, *own)


class Lfm2(ConvHybrid):
    """Dense networks, whose width the configuration adjusts."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        width = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            width = int(2 * width / 3)
            if (factor := config.block_ffn_dim_multiplier) is not None:
                multiple = config.block_multiple_of
                width = -(-int(factor * width) // multiple) * multiple
        sparse = [False] * config.num_hidden_layers
        super().__init__(config, dtype, ffn_width=width, sparse=sparse)


class Lfm2Moe(ConvHybrid):
    """Experts behind the first dense layers, chosen by sigmoids."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        sparse = [index >= config.num_dense_layers for index in range(config.num_hidden_layers)]
        super().__init__(config, dtype, ffn_width=config.intermediate_size, sparse=sparse)
