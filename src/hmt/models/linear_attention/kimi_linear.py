"""Kimi Linear: delta attention in most layers, latent attention without positions in the others.

arXiv 2510.26692.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers import (
    BiasedSigmoidRouter,
    DeltaAttention,
    LatentAttention,
    NoRotary,
    Params,
)
from hmt.models.config import (
    Config,
    check_experts,
    gated_ffn,
    latent_attention,
    layer_kinds,
    norm,
    require,
    residual_ffn,
)
from hmt.models.decoder import attention_block, expert_block, ffn_block, router_block
from hmt.models.deepseek import LatentDecoder, prediction_layers
from hmt.models.hybrid import caches_by_layer, convolution_taps, renamed

# transformers writes networks under the other name, whichever they had.
_NETWORKS = {".mlp.": ".block_sparse_moe."}


class LatentHybrid(LatentDecoder):
    """What Kimi Linear and its kin share: delta attention or latent attention, dense or experts.

    attends   which layers have latent attention
    """

    _attending = "full_attention"  # what layer_types calls them

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype,
        attention: LatentAttention,
        recurrent: DeltaAttention,
        **options: Any,
    ) -> None:
        """`options` are of Decoder."""
        require(config, "hidden_act", "silu")
        self.norm = norm(config)
        self.attention = attention
        self.recurrent = recurrent
        kinds = layer_kinds(config, self._attending, "linear_attention")
        self.attends = [kind == self._attending for kind in kinds]
        kinds = layer_kinds(config, "dense", "sparse", name="mlp_layer_types")
        self.sparse = [kind == "sparse" for kind in kinds]
        check_experts(config, config.num_local_experts, config.n_group, config.topk_group)
        self.router = BiasedSigmoidRouter(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            groups=config.n_group,
            kept_groups=config.topk_group,
            renormalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.ffn = residual_ffn(config)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared = gated_ffn(config, width, prefix="shared_")
        self.expert = gated_ffn(config, config.moe_intermediate_size)
        parts = (self.attention, self.recurrent, self.ffn, self.shared, self.expert)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(part.activation_width for part in parts),
            piece_width=self.attention.piece_width,
            router=self.router,
            **{"ignored": prediction_layers(config)} | options,
        )

    def blocks_of(
        self, index: int, names: Mapping[str, str], projections: tuple[str, str, str]
    ) -> Iterator[BlockSpec]:
        """The blocks of layer `index`; `names` they have besides, and `projections` of experts."""
        at = f"model.layers.{index}."
        if self.attends[index]:
            mixer = self.attention_params(index, f"{at}self_attn.")
        else:
            mixer = self.recurrent.params(f"{at}self_attn.")
        own = self.norm.param("norm", f"{at}input_layernorm.weight")
        yield attention_block(index, own, *renamed(mixer, names, also=True))
        own = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        if not self.sparse[index]:
            params = self.ffn.ffn.params(f"{at}mlp.")
            yield ffn_block(index, own, *renamed(params, _NETWORKS, also=True))
            return
        gate = renamed(self.router.params(f"{at}mlp.gate"), names, also=True)
        shared = renamed(self.shared.params(f"{at}mlp.shared_experts."), names, also=True)
        yield router_block(index, own, *gate, *shared)
        for expert in range(self.router.experts):
            params = self.expert.params(f"{at}mlp.experts.{expert}.", projections)
            yield expert_block(index, expert, *renamed(params, names, also=True))

    @override
    def mix(
        self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache
    ) -> Tensor | None:
        if self.attends[index]:
            return super().mix(index, hidden, step, params, kv)
        return self.recurrent(hidden, index, step, params, kv)


class KimiLinear(LatentHybrid):
    """No rotary positions; projections of low rank to decays and gates."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "mla_use_nope", True)
        require(config, "moe_layer_freq", 1)
        require(config, "moe_router_activation_func", "sigmoid")
        recurrent = low_rank_delta(config, scale_shape=(1, 1, config.linear_num_heads, 1))
        still = NoRotary(config.qk_rope_head_dim, config.max_position_embeddings)
        scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        super().__init__(config, dtype, latent_attention(config, still, scale), recurrent)

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        return self.blocks_of(index, _NETWORKS, ("w1", "w3", "w2"))


def low_rank_delta(
    config: Config, *, bound: float = 0.0, scale_shape: tuple[int, ...] = ()
) -> DeltaAttention:
    """Delta attention whose decays and gates are projections of low rank.

    bound, scale_shape   of decays: see `ops.DeltaHeads` and `DeltaAttention`
    """
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return DeltaAttention(
        config.hidden_size,
        ops.DeltaHeads(heads, heads, dim, dim, by_channel=True, bound=bound),
        norm(config),
        convolution_taps(config, "linear_conv_kernel_dim"),
        config.rms_norm_eps,
        "sigmoid",
        "f",
        decay_rank=dim,
        gate_rank=dim,
        scale_shape=scale_shape,
    )
