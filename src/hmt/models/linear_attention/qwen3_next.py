"""Qwen3-Next: gated delta nets in most layers, attention in the others, many small experts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockSpec, ParamSpec, Role
from hmt.kernels import ops
from hmt.layers import (
    Experts,
    FusableLayer,
    GatedAttention,
    GatedDeltaNet,
    Params,
    ResidualFFN,
    RMSNorm,
    SoftmaxRouter,
    project,
)
from hmt.models.config import (
    Config,
    attention,
    check_experts,
    gated_ffn,
    head_dim,
    layer_kinds,
    require,
    rotary,
)
from hmt.models.decoder import expert_block, ffn_block, router_block
from hmt.models.hybrid import Hybrid, caches_by_layer, convolution_taps


class DeltaHybrid(Hybrid):
    """What Qwen3-Next and Qwen3.5 share: each layer has a delta net or gated attention.

    Behind it a dense network, or routed experts and one that all tokens share, which is gated.
    """

    attention: GatedAttention
    recurrent: GatedDeltaNet
    router: SoftmaxRouter

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype,
        *,
        grouped: bool,
        sparse: Sequence[bool],
        renormalise: bool = True,
    ) -> None:
        """`grouped`: see GatedDeltaNet.  `sparse`: which layers have experts."""
        require(config, "hidden_act", "silu")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        head_norm = RMSNorm(head_dim(config), config.rms_norm_eps, offset=1.0)
        bias = config.attention_bias
        self.attention = GatedAttention(
            attention(
                config,
                rotary(config),
                norm=self.norm,
                bias=bias,
                output_bias=bias,
                head_norm=head_norm,
            )
        )
        self.recurrent = GatedDeltaNet(
            config.hidden_size,
            delta_heads(config),
            self.norm,
            convolution_taps(config, "linear_conv_kernel_dim"),
            config.rms_norm_eps,
            grouped,
            # GGUF files say so: hmt.formats.gguf.hybrid.
            apart=getattr(config, "linear_gates_apart", False),
            tiled=getattr(config, "linear_value_heads_tiled", False),
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = list(sparse)
        widths = [self.attention.activation_width, self.recurrent.activation_width]
        if not all(sparse):
            self.ffn = ResidualFFN(gated_ffn(config), self.norm)
            widths.append(self.ffn.activation_width)
        router = self._experts(config, renormalise=renormalise) if any(sparse) else None
        if router is not None:
            widths.append(2 * config.hidden_size + self.shared.activation_width)
            widths.append(self.expert.activation_width)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            **caches_by_layer(self.attends, self.attention.kv, self.recurrent.state),
            activation_width=max(widths),
            router=router,
            ignored=(r"^mtp\.",),
        )

    def _experts(self, config: Config, *, renormalise: bool) -> SoftmaxRouter:
        """Set up what layers with experts have."""
        check_experts(config, config.num_experts)
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        self.router = SoftmaxRouter(hidden, config.num_experts, top_k, renormalise=renormalise)
        self.shared = gated_ffn(config, config.shared_expert_intermediate_size, prefix="shared_")
        self.expert = gated_ffn(config, config.moe_intermediate_size)
        return self.router

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield self.mixer_block(index, "linear_attn")
        norm = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        if not self.sparse[index]:
            yield ffn_block(index, norm, *self.ffn.ffn.params(f"{at}mlp."))
            return
        gate = (f"{at}mlp.shared_expert_gate.weight",)
        yield router_block(
            index,
            norm,
            *self.router.params(f"{at}mlp.gate"),
            ParamSpec("shared_gate", (1, self.norm.width), gate, Role.VECTOR),
            *self.shared.params(f"{at}mlp.shared_expert."),
        )
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}mlp.experts.{expert}."))

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        mixer = self.attention if self.attends[index] else self.recurrent
        if not self.sparse[index]:
            return FusableLayer(mixer, self.network(index))
        experts = Experts(self.norm, self.router, self.expert, self.shared, shared_gated=True)
        return FusableLayer(mixer, experts)

    @override
    def shared_expert(self, x: Tensor, params: Params) -> Tensor:
        gate = project(x, params, "shared_gate")
        return ops.sigmoid_gated(self.shared(x, params), gate)


class Qwen3Next(DeltaHybrid):
    """Experts in all layers, or in some."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        sparse = [
            index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
            for index in range(config.num_hidden_layers)
        ]
        renormalise = config.norm_topk_prob
        super().__init__(config, dtype, grouped=True, sparse=sparse, renormalise=renormalise)


def delta_heads(config: Config, *, most_rate: float = 1.0) -> ops.DeltaHeads:
    """Sizes of the delta rule's heads.  Raises CheckpointError where they do not go together."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise CheckpointError(
            f"{values} value heads of linear attention cannot share {keys} key heads evenly"
        )
    dims = config.linear_key_head_dim, config.linear_value_head_dim
    return ops.DeltaHeads(keys, values, *dims, most_rate=most_rate)
