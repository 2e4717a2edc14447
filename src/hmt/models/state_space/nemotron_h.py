"""Nemotron-H and Nemotron 3: layers of one part each, Mamba-2, attention, a network or experts."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import KVLayer, LayerState
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    Attention,
    BiasedSigmoidRouter,
    GatedFFN,
    Mamba2,
    NoRotary,
    ResidualFFN,
    RMSNorm,
    add_routed_experts,
    linear_params,
    project,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, check_experts, head_dim, layer_kinds, require
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block
from hmt.models.hybrid import convolution_taps
from hmt.models.state_space.sizes import checked


class NemotronH(Decoder):
    """Networks square the positive part of what goes up; attention knows no positions.

    latent   numbers that routed experts take and give, between two projections that all share; 0:
             hidden states as they are
    """

    attention: Attention
    recurrent: Mamba2
    ffn: ResidualFFN
    router: BiasedSigmoidRouter

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "mlp_hidden_act", "relu2")
        require(config, "mamba_hidden_act", "silu")
        hidden = config.hidden_size
        self.norm = RMSNorm(hidden, config.layer_norm_epsilon)
        self.kinds = layer_kinds(config, "full_attention", "linear_attention", "mlp", "moe")
        dim = head_dim(config)
        self.attention = Attention(
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
            NoRotary(dim, config.max_position_embeddings),
            self.norm,
            dim**-0.5,
        )
        self.recurrent = self._mamba2(config)
        self.ffn = ResidualFFN(_network(config, config.intermediate_size), self.norm)
        kv: dict[str, KVLayer] = {"full_attention": self.attention.kv}
        state: dict[str, LayerState] = {"linear_attention": self.recurrent.state}
        parts = {
            "full_attention": self.attention.activation_width,
            "linear_attention": self.recurrent.activation_width,
            "mlp": self.ffn.activation_width,
        }
        sparse = "moe" in self.kinds
        if sparse:
            parts["moe"] = self._experts(config)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="backbone.norm_f.weight",
            table_name="backbone.embeddings.weight",
            kv=[kv.get(kind) for kind in self.kinds],
            state=[state.get(kind, ()) for kind in self.kinds],
            activation_width=max(parts[kind] for kind in self.kinds),
            router=self.router if sparse else None,
            ignored=(r"^mtp\.",),
        )

    def _mamba2(self, config: Config) -> Mamba2:
        inner = config.mamba_num_heads * config.mamba_head_dim
        fields = {
            "heads": config.mamba_num_heads,
            "head_dim": config.mamba_head_dim,
            "groups": config.n_groups,
            "state_dim": config.ssm_state_size,
            "conv": convolution_taps(config, "conv_kernel"),
            # As transformers' forward pass, which leaves time_step_limit aside.
            "steps": (float(config.time_step_min), float("inf")),
            "eps": config.layer_norm_epsilon,
            "bias": config.use_bias,
            "output_bias": config.use_bias,
            "conv_bias": config.use_conv_bias,
        }
        return checked(config, self.norm, inner, fields)

    def _experts(self, config: Config) -> int:
        """Set up what layers with experts have; numbers alive per token there."""
        hidden = config.hidden_size
        check_experts(config, config.n_routed_experts, config.n_group, config.topk_group)
        self.router = BiasedSigmoidRouter(
            hidden,
            config.n_routed_experts,
            config.num_experts_per_tok,
            groups=config.n_group,
            kept_groups=config.topk_group,
            renormalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.latent = config.moe_latent_size or 0
        width = config.moe_shared_expert_intermediate_size
        self.shared = _network(config, width, prefix="shared_")
        width = config.moe_intermediate_size
        self.expert = GatedFFN(self.latent or hidden, width, "relu", own_gate=False)
        widths = self.shared.activation_width + self.expert.activation_width
        return 3 * hidden + self.latent + widths

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        kind, at = self.kinds[index], f"backbone.layers.{index}."
        norm, at = self.norm.param("norm", f"{at}norm.weight"), f"{at}mixer."
        if kind == "full_attention":
            yield attention_block(index, norm, *self.attention.params(at))
        elif kind == "linear_attention":
            yield attention_block(index, norm, *self.recurrent.params(at))
        elif kind == "mlp":
            yield ffn_block(index, norm, *self.ffn.ffn.params(at))
        else:
            yield from self._expert_params(index, norm, at)

    def _expert_params(self, index: int, norm: ParamSpec, at: str) -> Iterator[BlockSpec]:
        router, shared = self.router.params(f"{at}gate"), self.shared.params(f"{at}shared_experts.")
        hidden, latent, bias = self.norm.width, self.latent, self.shared.bias
        between = (
            *linear_params("latent_down", latent, hidden, f"{at}fc1_latent_proj", bias=bias),
            *linear_params("latent_up", hidden, latent, f"{at}fc2_latent_proj", bias=bias),
        )
        yield router_block(index, norm, *router, *shared, *(between if latent else ()))
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}experts.{expert}."))

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        kind = self.kinds[index]
        if kind == "mlp":
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.ffn(hidden, None, params)
        if kind == "moe":
            return self._sparse(index, hidden, weights)
        mixer = self.attention if kind == "full_attention" else self.recurrent
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            return hidden + mixer(hidden, index, step, params, kv)

    def _sparse(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        """A layer of experts."""
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm(hidden, params["norm"])
            routing = self.router(x, params)
            given = project(x, params, "latent_down") if self.latent else x
            # On their way while the shared one computes.
            request_experts(given, routing, hidden, index, self.expert, weights)
            shared = self.shared(x, params)
        if not self.latent:
            return add_routed_experts(hidden, shared, x, routing, index, self.expert, weights)
        found = routed_experts(given, routing, index, self.expert, weights)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            return hidden + (project(found, params, "latent_up") + shared)


def _network(config: Config, width: int, prefix: str = "") -> GatedFFN:
    """A network that all tokens go through."""
    bias = config.mlp_bias
    return GatedFFN(config.hidden_size, width, "relu", bias=bias, prefix=prefix, own_gate=False)
