"""OpenAI's gpt-oss (model card arXiv 2508.10925)."""

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
    GatedFFN,
    SoftmaxRouter,
    request_experts,
    routed_experts,
)
from hmt.models.config import (
    Config,
    attention,
    check_experts,
    divided,
    norm,
    require,
    rotary,
    windows,
)
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block


class GptOss(Decoder):
    """Experts everywhere, every second layer with a window, and attention with sinks.

    Projections, router and experts have biases.  Experts use a SwiGLU whose inputs are clamped.
    Checkpoints keep all experts of a layer in one tensor, and a gate's and an up projection's rows
    interleaved; `formats` finds each expert's own under the names that are used here.
    """

    divides = ("heads", "experts")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        require(config, "swiglu_alpha", 1.702)
        require(config, "swiglu_limit", 7.0)
        self.norm = norm(config)
        turned_by = rotary(config)
        bias = config.attention_bias
        self.attention = [
            attention(config, turned_by, window=window, bias=bias, output_bias=bias, sinks=True)
            for window in windows(config)
        ]
        check_experts(config, config.num_local_experts)
        self.router = SoftmaxRouter(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            renormalise=True,
            bias=True,
        )
        self.expert = GatedFFN(
            config.hidden_size,
            config.intermediate_size,
            "clamped_swish",
            bias=True,
            share=divided(config, "experts"),
        )
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[layer.kv for layer in self.attention],
            activation_width=max(self.attention[0].activation_width, self.expert.activation_width),
            router=self.router,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention[index].params(f"{at}self_attn."),
        )
        yield router_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.router.params(f"{at}mlp.router"),
        )
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}mlp.experts.{expert}."))

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        experts = Experts(self.norm, self.router, self.expert)
        return FusableLayer(self.attention[index], experts)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention[index](hidden, index, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
        request_experts(x, routing, hidden, index, self.expert, weights)
        return hidden + routed_experts(x, routing, index, self.expert, weights)
