"""Qwen3-Next: gated delta nets in most layers, attention in the others, many small experts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import (
    GatedAttention,
    GatedDeltaNet,
    ResidualFFN,
    RMSNorm,
    SoftmaxRouter,
    add_routed_experts,
    project,
    request_experts,
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
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block

_MOST_TAPS = 64  # of a convolution; published models have 4


class DeltaHybrid(Decoder):
    """What Qwen3-Next and Qwen3.5 share: each layer has a delta net or gated attention.

    Behind it a dense network, or routed experts and one that all tokens share, which is gated.
    """

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
        self.delta = GatedDeltaNet(
            config.hidden_size,
            _delta_heads(config),
            self.norm,
            config.linear_conv_kernel_dim,
            config.rms_norm_eps,
            grouped,
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = list(sparse)
        widths = [self.attention.activation_width, self.delta.activation_width]
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
            kv=[self.attention.kv if attends else None for attends in self.attends],
            state=[() if attends else self.delta.state for attends in self.attends],
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
        if self.attends[index]:
            mixer = self.attention.params(f"{at}self_attn.")
        else:
            mixer = self.delta.params(f"{at}linear_attn.")
        norm = self.norm.param("norm", f"{at}input_layernorm.weight")
        yield attention_block(index, norm, *mixer)
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
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        mixer = self.attention if self.attends[index] else self.delta
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = mixer(hidden, index, step, params, kv)
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.ffn(hidden, x, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
            # On their way while the shared one computes.
            request_experts(x, routing, hidden, index, self.expert, weights)
            shared = self.shared(x, params)
            shared = ops.sigmoid_gated(shared, project(x, params, "shared_gate"))
        return add_routed_experts(hidden, shared, x, routing, index, self.expert, weights)


class Qwen3Next(DeltaHybrid):
    """Experts in all layers, or in some."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        sparse = [
            index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
            for index in range(config.num_hidden_layers)
        ]
        renormalise = config.norm_topk_prob
        super().__init__(config, dtype, grouped=True, sparse=sparse, renormalise=renormalise)


def _delta_heads(config: Config) -> ops.DeltaHeads:
    """Sizes of the delta rule's heads.  Raises CheckpointError where they do not go together."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise CheckpointError(
            f"{values} value heads of linear attention cannot share {keys} key heads evenly"
        )
    if not 2 <= config.linear_conv_kernel_dim <= _MOST_TAPS:
        raise CheckpointError(
            f"linear_conv_kernel_dim is {config.linear_conv_kernel_dim}; it must be from 2 to "
            f"{_MOST_TAPS}"
        )
    return ops.DeltaHeads(keys, values, config.linear_key_head_dim, config.linear_value_head_dim)
