"""Ling 3: delta attention in most layers, gated latent attention in the others, many experts."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockSpec
from hmt.kernels import ops
from hmt.layers import DeltaAttention
from hmt.models.config import Config, latent_attention, norm, require, rotary
from hmt.models.deepseek import latent_scale
from hmt.models.hybrid import convolution_taps
from hmt.models.linear_attention.kimi_linear import LatentHybrid

_NAMES = {
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    ".e_score_correction_bias": ".expert_bias",
}


class BailingHybrid(LatentHybrid):
    """As Kimi Linear, with positions, gates of latent attention, and decays that have a bound."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "head_dim", config.qk_rope_head_dim)
        require(config, "no_kda_lora", True)
        require(config, "gated_attention_proj_granularity_type", "head_wise")
        require(config, "expert_swiglu_limit_list", None)
        require(config, "share_expert_swiglu_limit_list", None)
        bound = config.kda_lower_bound if config.kda_safe_gate else 0.0
        if config.kda_safe_gate and not bound < 0:
            raise CheckpointError(f"kda_lower_bound is {bound}; it must be below 0")
        heads, dim = config.linear_num_heads, config.linear_head_dim
        recurrent = DeltaAttention(
            config.hidden_size,
            ops.DeltaHeads(heads, heads, dim, dim, by_channel=True, bound=float(bound)),
            norm(config),
            convolution_taps(config, "linear_conv_kernel_dim"),
            config.rms_norm_eps,
            "sigmoid",
            "f",
        )
        attention = latent_attention(
            config, rotary(config), latent_scale(config), interleaved=True, gated=True
        )
        table = "model.word_embeddings.weight"
        super().__init__(config, dtype, attention, recurrent, table_name=table)

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        return self.blocks_of(index, _NAMES, ("gate_proj", "up_proj", "down_proj"))
