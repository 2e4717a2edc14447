"""LFM2: short convolutions in most layers, attention in the others (arXiv 2511.23404)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import (
    Attention,
    GatedFFN,
    Params,
    ResidualFFN,
    RMSNorm,
    Routing,
    ShortConv,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, check_experts, head_dim, layer_kinds, require, rotary
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block

_MOST_TAPS = 64  # of a convolution; published models have 3
_NAMES = ("w1", "w3", "w2")
_RENAMED = {".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm.", ".o_proj.": ".out_proj."}


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """The top_k of sigmoids, chosen with a bias or without, which add up to `scale` if normal."""

    hidden_size: int
    experts: int
    top_k: int
    biased: bool
    renormalise: bool
    scale: float

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight, `at`gate.weight, and its bias, `at`expert_bias."""
        shape = (self.experts, self.hidden_size)
        weight = ParamSpec("router", shape, (f"{at}gate.weight",), Role.VECTOR)
        bias = ParamSpec("router_bias", shape[:1], (f"{at}expert_bias",), Role.VECTOR)
        return (weight, bias) if self.biased else (weight,)

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]; probabilities in f32."""
        likely = ops.sigmoid(ops.linear(x, params["router"]))
        wanted = likely + params["router_bias"].data.float() if self.biased else likely
        chosen = wanted.topk(self.top_k, dim=-1).indices
        scales = likely.gather(1, chosen)
        if self.renormalise:
            scales = scales / (scales.sum(-1, keepdim=True) + 1e-6)
        return Routing(chosen, scales * self.scale)


class ConvHybrid(Decoder):
    """What LFM2 and LFM2-MoE share: a convolution or attention, then a network or experts."""

    def __init__(
        self, config: Config, dtype: torch.dtype, *, ffn_width: int, sparse: Sequence[bool]
    ) -> None:
        """`sparse`: which layers have experts."""
        require(config, "conv_bias", False)
        if not 2 <= config.conv_L_cache <= _MOST_TAPS:
            raise CheckpointError(
                f"conv_L_cache is {config.conv_L_cache}; it must be from 2 to {_MOST_TAPS}"
            )
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
        self.conv = ShortConv(hidden, self.norm, config.conv_L_cache)
        kinds = layer_kinds(config, "full_attention", "conv")
        self.attends = [kind == "full_attention" for kind in kinds]
        self.sparse = list(sparse)
        self.ffn = ResidualFFN(GatedFFN(hidden, ffn_width, "silu"), self.norm)
        parts = [self.attention.activation_width, self.conv.activation_width]
        parts += [self.ffn.activation_width] * (not all(sparse))
        router = self._experts(config) if any(sparse) else None
        if router is not None:
            parts.append(self.expert.activation_width + hidden)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="model.embedding_norm.weight",
            kv=[self.attention.kv if attends else None for attends in self.attends],
            state=[() if attends else self.conv.state for attends in self.attends],
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
            mixer = tuple(map(_renamed, self.attention.params(f"{at}self_attn.")))
        else:
            mixer = self.conv.params(f"{at}conv.")
        yield attention_block(index, norm, *mixer)
        norm, at = self.norm.param("norm", f"{at}ffn_norm.weight"), f"{at}feed_forward."
        if not self.sparse[index]:
            yield ffn_block(index, norm, *self.ffn.ffn.params(at, _NAMES))
            return
        yield router_block(index, norm, *self.router.params(at))
        for expert in range(self.router.experts):
            own = self.expert.params(f"{at}experts.{expert}.", _NAMES)
            yield expert_block(index, expert, *own)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        mixer = self.attention if self.attends[index] else self.conv
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = mixer(hidden, index, step, params, kv)
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.ffn(hidden, x, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
        request_experts(x, routing, hidden, index, self.expert, weights)
        return hidden + routed_experts(x, routing, index, self.expert, weights)


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


def _renamed(param: ParamSpec) -> ParamSpec:
    """A parameter of attention under the names of these checkpoints."""
    sources = []
    for source in param.sources:
        for usual, own in _RENAMED.items():
            source = source.replace(usual, own)
        sources.append(source)
    return replace(param, sources=tuple(sources))
