"""Qwen3, dense and with experts (arXiv 2505.09388)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    Experts,
    FusableLayer,
    RMSNorm,
    SoftmaxRouter,
    request_experts,
    routed_experts,
)
from hmt.models.config import (
    Config,
    attention,
    check_experts,
    expert_ffn,
    head_dim,
    norm,
    residual_ffn,
    rotary,
    windows,
)
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block


class Qwen3(Decoder):
    """Llama with a norm of each query and key head before rotation; no biases as published."""

    divides = ("heads", "width")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        turned_by = rotary(config)
        self.attention = [
            attention(
                config,
                turned_by,
                window=window,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
            )
            for window in windows(config)
        ]
        self.ffn = residual_ffn(config)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[layer.kv for layer in self.attention],
            activation_width=max(self.attention[0].activation_width, self.ffn.activation_width),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention[index].params(f"{at}self_attn."),
        )
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.ffn.ffn.params(f"{at}mlp."),
        )

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(self.attention[index], self.ffn)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention[index](hidden, index, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return self.ffn(hidden, x, params)


class Qwen3Moe(Decoder):
    """Qwen3 with many small experts in place of the FFN, in all layers or in some."""

    divides = ("heads", "width", "experts")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        self.attention = attention(
            config,
            rotary(config),
            window=config.sliding_window or 0,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norm=RMSNorm(head_dim(config), config.rms_norm_eps),
        )
        self.ffn = residual_ffn(config)
        check_experts(config, config.num_experts)
        self.router = SoftmaxRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            renormalise=config.norm_topk_prob,
        )
        self.expert = expert_ffn(config, config.moe_intermediate_size)
        self.sparse = [
            index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
            for index in range(config.num_hidden_layers)
        ]
        parts = (self.attention, self.ffn, self.expert)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.attention.kv] * config.num_hidden_layers,
            activation_width=max(part.activation_width for part in parts),
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
        norm = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        if not self.sparse[index]:
            yield ffn_block(index, norm, *self.ffn.ffn.params(f"{at}mlp."))
            return
        yield router_block(index, norm, *self.router.params(f"{at}mlp.gate"))
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}mlp.experts.{expert}."))

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(
            self.attention,
            Experts(self.norm, self.router, self.expert) if self.sparse[index] else self.ffn,
        )

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention(hidden, index, step, params, kv)
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.ffn(hidden, x, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
        request_experts(x, routing, hidden, index, self.expert, weights)
        return hidden + routed_experts(x, routing, index, self.expert, weights)
