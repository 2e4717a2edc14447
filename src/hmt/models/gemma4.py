"""Gemma 4, the text models: E2B and E4B, with embeddings of each layer; larger ones; experts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    GatedFFN,
    LayerEmbedding,
    Params,
    ResidualFFN,
    RMSNorm,
    ScaledSoftmaxRouter,
    SharingAttention,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, activation, attention, layer_kinds, norm, require, rotary
from hmt.models.decoder import Decoder, attention_block, expert_block, ffn_block, router_block

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_ROWS = BlockId(TRUNK, BlockKind.EMBEDDING, 1)
_NOT_CAPTURED = "layers have embeddings of their own, which are looked up outside of a step"
_SHARES = "layers attend to keys and values of earlier ones"


class Gemma4(Decoder):
    """Norms around attention and FFN; heads, values too, are normed; a layer ends with a factor.

    Layers without a window have wider heads, of which a part turns, and perhaps no values of their
    own.  The last `num_kv_shared_layers` attend to the keys and values of the last layer before
    them of their kind.
    """

    staged = False

    def __init__(
        self, config: Config, dtype: torch.dtype, lent: Mapping[str, int] | None = None
    ) -> None:
        """`lent`: by kind, layers of another model to whose KV cache all layers attend."""
        require(config, "use_bidirectional_attention", None, "vision", False)
        self.norm = norm(config)
        kinds = layer_kinds(config, _FULL, _SLIDING)
        self.attention = _attention(config, self.norm, kinds, lent)
        shares = [layer.source is not None for layer in self.attention]
        self.ffn = [
            ResidualFFN(_network(config, wide=sharing), self.norm, post_norm=True)
            for sharing in shares
        ]
        self.router, self.shared, self.expert = _experts(config)
        self.inputs = _layer_embedding(config)
        self.rows = config.vocab_size_per_layer_input
        self.pad = config.pad_token_id or 0
        widths = [layer.activation_width for layer in self.attention]
        widths += [layer.activation_width for layer in self.ffn]
        if self.router is not None:
            # Beside the network of all tokens: what experts are given, and both results.
            widths.append(max(widths) + 3 * config.hidden_size + self.expert.activation_width)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            router=self.router,
            kv=[layer.kv for layer in self.attention],
            activation_width=max(widths) + (self.inputs.activation_width if self.inputs else 0),
            ignored=[
                rf"^model\.layers\.{index}\.self_attn\.[kv]_(proj|norm)\."
                for index, sharing in enumerate(shares)
                if sharing
            ],
            # Rounded to the dtype of activations, as it was in training.
            embedding_factor=float(torch.tensor(config.hidden_size**0.5, dtype=dtype)),
            tables=[BlockSpec(_LAYER_ROWS, (self.inputs.table(self.rows),))] if self.inputs else [],
            logit_softcap=config.final_logit_softcapping,
            uncaptured=_NOT_CAPTURED if self.inputs else _SHARES if any(shares) else "",
            kv_sources={
                index: layer.source
                for index, layer in enumerate(self.attention)
                if layer.source is not None and lent is None
            },
        )
        # Embeddings of the last step's tokens, and their rows of all layers.
        self._embedded: tuple[tuple[Segment, ...], Tensor, Tensor] | None = None

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention[index].params(f"{at}self_attn."),
            self.norm.param("post_norm", f"{at}post_attention_layernorm.weight"),
        )
        norm = self.norm.param("norm", f"{at}pre_feedforward_layernorm.weight")
        ending = (
            self.norm.param("post_norm", f"{at}post_feedforward_layernorm.weight"),
            *(self.inputs.params(index, at) if self.inputs else ()),
            ParamSpec("scalar", (1,), (f"{at}layer_scalar",), Role.VECTOR),
        )
        if self.router is None:
            yield ffn_block(index, norm, *self.ffn[index].ffn.params(f"{at}mlp."), *ending)
            return
        yield router_block(
            index,
            norm,
            *self.shared[index].params(f"{at}mlp."),
            self.norm.param("shared_norm", f"{at}post_feedforward_layernorm_1.weight"),
            *self.router.params(f"{at}router."),
            self.norm.param("expert_norm", f"{at}pre_feedforward_layernorm_2.weight"),
            self.norm.param("found_norm", f"{at}post_feedforward_layernorm_2.weight"),
            *ending,
        )
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *self.expert.params(f"{at}experts.{expert}."))

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        if self.inputs is None:
            return super().embed(step, weights)
        images = step.image_rows
        if images is not None:  # layers look padding up for tokens of images
            images = images.to(step.token_ids.device)
            step = replace(step, token_ids=step.token_ids.index_fill(0, images, self.pad))
        # First, since it is the longest read.
        rows = weights.rows(_LAYER_ROWS, "weight", step.token_ids).to(self.dtype)
        hidden = super().embed(step, weights)
        rows = rows * float(torch.tensor(self.inputs.width**0.5, dtype=self.dtype))
        given = hidden.clone()
        if images is not None and step.image_features is not None:
            given[images.to(given.device)] = step.image_features.to(given)
        self._embedded = step.segments, given, rows
        return hidden

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention[index](hidden, index, step, params, kv)
            x = self.norm(x, params["post_norm"])
        if self.router is not None:
            return self._sparse(index, hidden + x, step, weights)
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            hidden = self.ffn[index](hidden, x, params)
            where = params["scalar"].data.device  # of the block, which the CPU may compute
            ended = self._ended(index, hidden.to(where), step, params)
        return ended.to(hidden.device)

    def _sparse(self, index: int, hidden: Tensor, step: Step, weights: Weights) -> Tensor:
        """The second half of a layer: a network for all tokens, and experts beside it."""
        assert self.router is not None
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            routing = self.router(hidden, params)
            given = self.norm(hidden, params["expert_norm"])
            # On their way while the shared one computes.
            request_experts(given, routing, hidden, index, self.expert, weights)
            shared = self.shared[index](self.norm(hidden, params["norm"]), params)
            shared = self.norm(shared, params["shared_norm"])
        found = routed_experts(given, routing, index, self.expert, weights)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            both = shared + self.norm(found, params["found_norm"])
            hidden = hidden + self.norm(both, params["post_norm"])
            return self._ended(index, hidden, step, params)

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        assert self.router is not None
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            return self.router(hidden, params).experts

    def _ended(self, index: int, hidden: Tensor, step: Step, params: Params) -> Tensor:
        """What comes behind the network of a layer."""
        if self.inputs is not None:
            assert self._embedded is not None
            runs, embedding, rows = self._embedded
            assert runs is step.segments, "a step is embedded before its layers"
            row = rows.unflatten(1, (self.inputs.layers, -1))[:, index]
            embedding, row = (part.to(hidden.device).contiguous() for part in (embedding, row))
            hidden = self.inputs(hidden, embedding, row, params)
        return hidden * params["scalar"].data.to(hidden.dtype)


def _attention(
    config: Config, hidden_norm: RMSNorm, kinds: list[str], lent: Mapping[str, int] | None
) -> list[SharingAttention]:
    """That of all layers."""
    first = 0 if lent is not None else len(kinds) - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(kinds[:first])} if lent is None else lent
    if not 0 <= first <= len(kinds) or not set(kinds[first:]) <= set(last):
        raise CheckpointError(
            f"num_kv_shared_layers is {config.num_kv_shared_layers} of {len(kinds)} layers; each "
            "must have one of its kind before all of them, whose keys and values it uses"
        )
    turned_by = {kind: rotary(config, kind) for kind in sorted(last)}
    layers = []
    for index, kind in enumerate(kinds):
        own = config.per_layer_config[index]
        layer = attention(
            own,
            turned_by[kind],
            window=config.sliding_window if kind == _SLIDING else 0,
            scale=1.0,
            norm=hidden_norm,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norm=RMSNorm(own.head_dim, config.rms_norm_eps),
        )
        source = None if index < first else last[kind]
        layers.append(SharingAttention(layer, source, config.attention_k_eq_v and kind == _FULL))
    return layers


def _network(config: Config, *, wide: bool) -> GatedFFN:
    """That of a layer; one that shares keys and values may be twice as wide."""
    width = config.intermediate_size * (2 if wide and config.use_double_wide_mlp else 1)
    return GatedFFN(config.hidden_size, width, activation(config, "hidden_activation"))


def _experts(config: Config) -> tuple[ScaledSoftmaxRouter | None, list[GatedFFN], GatedFFN]:
    """Who chooses them, networks of all tokens beside them, and one of them; None: there are none.

    The networks are as wide as those of layers without experts.
    """
    act = activation(config, "hidden_activation")
    if not config.enable_moe_block:
        return None, [], GatedFFN(config.hidden_size, 1, act)
    top_k, experts, width = config.top_k_experts, config.num_experts, config.moe_intermediate_size
    if not all(type(count) is int and count > 0 for count in (top_k, experts, width)):
        raise CheckpointError(
            f"top_k_experts, num_experts and moe_intermediate_size are {top_k!r}, {experts!r} and "
            f"{width!r}; each must be above 0 where enable_moe_block is true"
        )
    if top_k > experts:
        raise CheckpointError(f"top_k_experts is {top_k} of {experts} experts")
    router = ScaledSoftmaxRouter(config.hidden_size, experts, top_k, config.rms_norm_eps)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    networks = [
        replace(_network(config, wide=index >= first), prefix="shared_")
        for index in range(config.num_hidden_layers)
    ]
    return router, networks, GatedFFN(config.hidden_size, width, act)


def _layer_embedding(config: Config) -> LayerEmbedding | None:
    width, rows = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
    if not width:
        return None
    if rows < config.vocab_size:
        raise CheckpointError(
            f"vocab_size_per_layer_input is {rows}; {config.vocab_size} tokens need as many rows"
        )
    return LayerEmbedding(
        config.hidden_size,
        width,
        config.num_hidden_layers,
        activation(config, "hidden_activation"),
        config.rms_norm_eps,
    )
