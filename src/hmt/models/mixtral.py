"""Mixtral 8x7B and 8x22B (arXiv 2401.04088)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import Experts, FusableLayer, SoftmaxRouter, request_experts, routed_experts
from hmt.models.config import Config, attention, check_experts, gated_ffn, norm, rotary
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block


class Mixtral(Decoder):
    """Mistral with experts in place of the FFN; each token goes to the most probable few."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        self.attention = attention(config, rotary(config), window=config.sliding_window or 0)
        check_experts(config, config.num_local_experts)
        self.router = SoftmaxRouter(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            renormalise=True,
        )
        self.expert = gated_ffn(config)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.attention.kv] * config.num_hidden_layers,
            activation_width=max(self.attention.activation_width, self.expert.activation_width),
            router=self.router,
        )

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
            *self.router.params(f"{at}block_sparse_moe.gate"),
        )
        for expert in range(self.router.experts):
            names = (f"{at}block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))
            yield expert_block(index, expert, *self.expert.params(*names))

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(self.attention, Experts(self.norm, self.router, self.expert))

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
