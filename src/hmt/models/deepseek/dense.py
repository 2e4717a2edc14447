"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3, R1 and their kin (arXiv 2412.19437)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    BiasedSigmoidRouter,
    GatedFFN,
    GroupedSoftmaxRouter,
    LatentAttention,
    Params,
    ResidualFFN,
    RMSNorm,
    add_routed_experts,
    request_experts,
    router_inputs,
    yarn_mscale,
)
from hmt.models.config import (
    Config,
    check_experts,
    expert_ffn,
    gated_ffn,
    latent_attention,
    layer_kinds,
    norm,
    require,
    residual_ffn,
    rotary,
)
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block


class LatentDecoder(Decoder):
    """Latent attention, unless `mix` says otherwise; a dense network, or shared and routed experts.

    sparse   which layers have experts
    """

    norm: RMSNorm
    attention: LatentAttention
    ffn: ResidualFFN
    router: GroupedSoftmaxRouter | BiasedSigmoidRouter
    shared: GatedFFN
    expert: GatedFFN
    sparse: list[bool]

    def mix(
        self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache
    ) -> Tensor | None:
        """What layer `index` adds to hidden before its network; None where it has been added."""
        if self.attention.add_to(hidden, self.norm, index, step, params, kv):
            return None
        return self.attention(self.norm(hidden, params["norm"]), index, step, params, kv)

    def router_inputs(
        self, hidden: Tensor, x: Tensor | None, params: Params
    ) -> tuple[Tensor, Tensor]:
        """hidden += x; its norm, and the router's logits."""
        return router_inputs(hidden, x, self.norm, params)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.mix(index, hidden, step, params, kv)
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.ffn(hidden, x, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, logits = self.router_inputs(hidden, x, params)
            routing = self.router.choose(logits, params)
            # On their way while the shared ones compute.
            request_experts(x, routing, hidden, index, self.expert, weights)
            shared = self.shared(x, params)
        return add_routed_experts(hidden, shared, x, routing, index, self.expert, weights)

    def norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        """Of a norm before attention, or before a router."""
        return (self.norm.param("norm", f"{at}weight"),)

    def attention_params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        """Of layer `index`, called `at` + kv_a_proj_with_mqa and so on."""
        return self.attention.params(at)

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            *self.norm_params(f"{at}input_layernorm."),
            *self.attention_params(index, f"{at}self_attn."),
        )
        if not self.sparse[index]:
            norm = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
            yield ffn_block(index, norm, *self.ffn.ffn.params(f"{at}mlp."))
            return
        yield router_block(
            index,
            *self.norm_params(f"{at}post_attention_layernorm."),
            *self.router.params(f"{at}mlp.gate"),
            *self.shared.params(f"{at}mlp.shared_experts."),
        )
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}mlp.experts.{expert}."))


class DeepSeek(LatentDecoder):
    """Latent attention; dense first layers, then shared and routed experts.

    The families differ in how the router chooses.
    """

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype,
        router: GroupedSoftmaxRouter | BiasedSigmoidRouter,
        *,
        interleaved: bool,
        mlp_bias: bool,
    ) -> None:
        require(config, "moe_layer_freq", 1)
        require(config, "head_dim", config.qk_rope_head_dim)
        self.norm = norm(config)
        self.attention = latent_attention(
            config, rotary(config), latent_scale(config), interleaved=interleaved
        )
        self.ffn = residual_ffn(config, bias=mlp_bias)
        self.router = router
        self.shared = gated_ffn(
            config,
            config.moe_intermediate_size * config.n_shared_experts,
            bias=mlp_bias,
            prefix="shared_",
        )
        self.expert = expert_ffn(config, config.moe_intermediate_size)
        self.sparse = sparse_layers(config)
        parts = (self.attention, self.ffn, self.shared, self.expert)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.attention.kv] * config.num_hidden_layers,
            activation_width=max(part.activation_width for part in parts),
            piece_width=self.attention.piece_width,
            router=self.router,
            ignored=prediction_layers(config),
        )


class DeepSeekV2(DeepSeek):
    """Experts by softmax, from the groups with the best expert where `topk_method` says so."""

    divides = ("width", "experts")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "scoring_func", "softmax")
        require(config, "topk_method", "greedy", "group_limited_greedy")
        # The published code then leaves routed_scaling_factor out; transformers does not.
        require(config, "norm_topk_prob", False)
        grouped = config.topk_method == "group_limited_greedy"
        groups, kept_groups = (config.n_group, config.topk_group) if grouped else (1, 1)
        check_experts(config, config.n_routed_experts, groups, kept_groups)
        router = GroupedSoftmaxRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            groups=groups,
            kept_groups=kept_groups,
            scale=config.routed_scaling_factor,
        )
        super().__init__(config, dtype, router, interleaved=True, mlp_bias=config.mlp_bias)


class DeepSeekV3(DeepSeek):
    """Experts by sigmoid with a bias that balances them, from the best groups."""

    divides = ("width", "experts")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "scoring_func", "sigmoid")
        require(config, "topk_method", "noaux_tc")
        router = biased_router(config)
        interleaved = getattr(config, "rope_interleave", True)
        super().__init__(config, dtype, router, interleaved=interleaved, mlp_bias=False)


def biased_router(config: Config) -> BiasedSigmoidRouter:
    """That of DeepSeek-V3.  Raises CheckpointError for sizes that do not belong together."""
    check_experts(config, config.n_routed_experts, config.n_group, config.topk_group)
    return BiasedSigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        groups=config.n_group,
        kept_groups=config.topk_group,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def sparse_layers(config: Config) -> list[bool]:
    """Which layers have experts."""
    if getattr(config, "mlp_layer_types", None) is None:
        dense = config.first_k_dense_replace
        return [index >= dense for index in range(config.num_hidden_layers)]
    kinds = layer_kinds(config, "dense", "sparse", name="mlp_layer_types")
    return [kind == "sparse" for kind in kinds]


def latent_scale(config: Config) -> float:
    """Of the scores.  A context stretched by YaRN makes attention sharper, by mscale_all_dim."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    parameters = config.rope_parameters
    all_dim = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not all_dim:
        return scale
    return scale * yarn_mscale(parameters["factor"], all_dim) ** 2


def prediction_layers(config: Config) -> list[str]:
    """Names of multi-token prediction layers, which follow the decoder's."""
    first = config.num_hidden_layers
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    return [rf"^model\.layers\.{index}\." for index in range(first, first + count)]
