"""Mixtral 8x7B and 8x22B (arXiv 2401.04088), and MiniMax-M2."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    Attention,
    BiasedSigmoidRouter,
    Experts,
    FusableLayer,
    PostNormAttention,
    SoftmaxRouter,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, attention, check_experts, expert_ffn, norm, require, rotary
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block


class Mixtral(Decoder):
    """Mistral with experts in place of the FFN; each token goes to the most probable few."""

    divides: ClassVar[tuple[str, ...]] = ("heads", "experts")

    attention: Attention | PostNormAttention
    router: SoftmaxRouter | BiasedSigmoidRouter

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        self.attention = self._attention_of(config)
        check_experts(config, config.num_local_experts)
        self.router = self._router_of(config)
        self.expert = expert_ffn(config)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.attention.kv] * config.num_hidden_layers,
            activation_width=max(self.attention.activation_width, self.expert.activation_width),
            router=self.router,
        )

    def _attention_of(self, config: Config) -> Attention | PostNormAttention:
        return attention(config, rotary(config), window=config.sliding_window or 0)

    def _router_of(self, config: Config) -> SoftmaxRouter | BiasedSigmoidRouter:
        experts, top_k = config.num_local_experts, config.num_experts_per_tok
        return SoftmaxRouter(config.hidden_size, experts, top_k, renormalise=True)

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention.params(f"{at}self_attn."),
        )
        yield router_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.router_params(f"{at}block_sparse_moe."),
        )
        for expert in range(self.router.experts):
            names = (f"{at}block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))
            yield expert_block(index, expert, *self.expert.params(*names))

    def router_params(self, at: str) -> tuple[ParamSpec, ...]:
        """Of a router, called `at` + gate in the checkpoint."""
        return self.router.params(f"{at}gate")

    @override
    def fusable_layer(self, index: int) -> FusableLayer | None:
        own, router = self.attention, self.router
        if not isinstance(own, Attention) or not isinstance(router, SoftmaxRouter):
            return None
        return FusableLayer(own, Experts(self.norm, router, self.expert))

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention(hidden, index, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
        request_experts(x, routing, hidden, index, self.expert, weights)
        return hidden + routed_experts(x, routing, index, self.expert, weights)


class MiniMaxM2(Mixtral):
    """Experts by sigmoids with a bias; queries and keys of all heads are normed as one row."""

    divides: ClassVar[tuple[str, ...]] = ("experts",)

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "scoring_func", "sigmoid")
        require(config, "use_qk_norm", True)
        super().__init__(config, dtype)

    @override
    def _attention_of(self, config: Config) -> PostNormAttention:
        return PostNormAttention(attention(config, rotary(config)), pre_norm=True)

    @override
    def _router_of(self, config: Config) -> BiasedSigmoidRouter:
        experts, top_k = config.num_local_experts, config.num_experts_per_tok
        return BiasedSigmoidRouter(
            config.hidden_size, experts, top_k, groups=1, kept_groups=1, renormalise=True, scale=1.0
        )

    @override
    def router_params(self, at: str) -> tuple[ParamSpec, ...]:
        weight, bias = self.router.params(f"{at}gate")
        return weight, replace(bias, sources=(f"{at}e_score_correction_bias",))
