"""DeepSeek-V4: attention to compressed entries, several residual streams, experts by token.

Between layers there are `hc_mult` residual streams: see `HyperConnection`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import PAGE_TOKENS, KVKind
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    CompressedAttention,
    Compressor,
    EntryIndexer,
    EntryPart,
    GatedFFN,
    GroupedOutput,
    GroupRows,
    HyperConnection,
    HyperHead,
    Params,
    RMSNorm,
    SoftplusRouter,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, check_experts, layer_kinds, norm, require, rotary
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block
from hmt.models.hybrid import renamed

_SLIDING, _SELECTED, _ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_MOST_STREAMS = 64
_MOST_ITERATIONS = 1000
_MOST_POSITIONS = 1 << 20  # of an entry
_NAMES = ("w1", "w3", "w2")  # of a gate, of what goes through it, and down
# The published files' beginnings, beside those that transformers writes.
_PUBLISHED = {
    "model.embed_tokens.": "embed.",
    "lm_head.": "head.",
    "model.hc_head.": "hc_head_",
    "hc_head_hc_": "hc_head_",
    "model.": "",
}
_NOT_CAPTURED = (
    "entries become known at some tokens only, and each step gathers other rows of the KV cache"
)


class DeepSeekV4(Decoder):
    """Every layer has experts, one of which all tokens share; attention is of three kinds.

    It sees a window, and in most layers entries besides, of few positions each, of which an indexer
    selects some, or of many.
    """

    staged = False

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        _check(config)
        self._kinds = layer_kinds(config, _SLIDING, _SELECTED, _ALL)
        self._attentions = {kind: _attention(config, kind) for kind in sorted(set(self._kinds))}
        kinds = layer_kinds(config, "hash_moe", "moe", name="mlp_layer_types")
        self._routers = [_router(config, by_token=kind == "hash_moe") for kind in kinds]
        hidden, width = config.hidden_size, config.moe_intermediate_size
        shared = width * config.n_shared_experts
        self._shared = GatedFFN(hidden, shared, "clamped_silu", prefix="shared_")
        self._expert = GatedFFN(hidden, width, "clamped_silu")
        self._hyper = HyperConnection(
            hidden,
            config.hc_mult,
            config.hc_sinkhorn_iters,
            config.rms_norm_eps,
            config.hc_eps,
            "hyper_",
        )
        self._collapse = HyperHead(
            hidden, config.hc_mult, config.rms_norm_eps, config.hc_eps, "hyper_"
        )
        widths = [attention.activation_width for attention in self._attentions.values()]
        widths += [self._shared.activation_width + hidden, self._expert.activation_width]
        # Of the last step, for guesses of what its tokens will choose.
        self._token_ids: Tensor | None = None
        super().__init__(
            config,
            dtype,
            norm=norm(config),
            kv=[self._attentions[kind].kv for kind in self._kinds],
            activation_width=max(widths) + self._hyper.activation_width,
            router=self._routers[0],
            ignored=(r"(^|\.)mtp\.",),
            uncaptured=_NOT_CAPTURED,
            state=[
                () if (own := self._attentions[kind].compressor) is None else own.state
                for kind in self._kinds
            ],
        )
        self._complete_spec(config)

    def _complete_spec(self, config: Config) -> None:
        """Names that publishers use, and what layers keep beside rows of a window."""
        indexers = (self._attentions[kind].indexer for kind in self._kinds)
        rows = (self._attentions[kind].rows for kind in self._kinds)
        self.spec = replace(
            self.spec,
            blocks=tuple(
                replace(block, params=renamed(block.params, _PUBLISHED, also=True))
                for block in self.spec.blocks
            ),
            index_keys=tuple(None if own is None else own.keys for own in indexers),
            compressed=tuple(None if own is None else own.kv(KVKind.LATENT) for own in rows),
            gathered_width=max(
                attention.gathered_width(self.spec.max_context)
                for attention in self._attentions.values()
            ),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at, first = f"model.layers.{index}.", self._norm
        yield attention_block(
            index,
            *self._hyper.params(f"{at}hc_attn_"),
            first.param("norm", f"{at}attn_norm.weight"),
            *self._attentions[self._kinds[index]].params(f"{at}attn."),
        )
        yield router_block(
            index,
            *self._hyper.params(f"{at}hc_ffn_"),
            first.param("norm", f"{at}ffn_norm.weight"),
            *self._routers[index].params(f"{at}ffn.gate"),
            *self._shared.params(f"{at}ffn.shared_experts.", _NAMES),
        )
        for expert in range(self._routers[index].experts):
            own = self._expert.params(f"{at}ffn.experts.{expert}.", _NAMES)
            yield expert_block(index, expert, *own)

    @override
    def final_params(self, norm_name: str) -> tuple[ParamSpec, ...]:
        own = self._collapse.params("model.hc_head.")
        return (self._norm.param("norm", norm_name), *own)

    @override
    def final_norm(self, hidden: Tensor, params: Params) -> Tensor:
        return self._norm(self._collapse(hidden, params), params["norm"])

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        self._token_ids = step.token_ids
        return super().embed(step, weights).repeat(1, self._hyper.streams)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        numbers = self.spec.index_layer(index), self.spec.compressed_layer(index)
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x, mix = self._hyper.read(hidden, params)
            x = self._norm(x, params["norm"])
            attention = self._attentions[self._kinds[index]]
            x = attention(x, index, numbers, step, params, kv)
            hidden = self._hyper.write(hidden, x, mix)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, mix = self._hyper.read(hidden, params)
            x = self._norm(x, params["norm"])
            routing = self._routers[index](x, params, step.token_ids)
            # On their way while the shared one computes.
            request_experts(x, routing, hidden, index, self._expert, weights)
            shared = self._shared(x, params)
            x = routed_experts(x, routing, index, self._expert, weights) + shared
            return self._hyper.write(hidden, x, mix)

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        known = self._token_ids
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self._norm(self._hyper.read(hidden, params)[0], params["norm"])
            ids = known if known is not None and len(known) == len(hidden) else None
            return self._routers[index](x, params, ids).experts


def _check(config: Config) -> None:
    """Raise CheckpointError for what this family does not compute, and sizes that cannot be."""
    require(config, "hidden_act", "silu")
    require(config, "swiglu_limit", 10.0)
    require(config, "scoring_func", "sqrtsoftplus")
    require(config, "num_key_value_heads", 1)
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)
    check_experts(config, config.n_routed_experts)
    most = {"hc_mult": _MOST_STREAMS, "hc_sinkhorn_iters": _MOST_ITERATIONS}
    most |= dict.fromkeys(("o_groups", "o_lora_rank", "n_shared_experts"), 1 << 16)
    for name, limit in most.items():
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(f"{name} is {value!r}; it must be from 1 to {limit}")
    width = config.num_attention_heads * config.head_dim
    if width % config.o_groups:
        raise CheckpointError(
            f"{width} numbers of all heads cannot be divided among o_groups {config.o_groups}"
        )


def _router(config: Config, *, by_token: bool) -> SoftplusRouter:
    return SoftplusRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
        config.vocab_size,
        by_token=by_token,
    )


def _attention(config: Config, kind: str) -> CompressedAttention:
    """That of layers of a kind.  Raises CheckpointError where sizes do not go together."""
    turned = rotary(config, "main" if kind == _SLIDING else "compress")
    dim = 2 * len(turned.frequencies(1))
    if turned.border is not None or dim > config.head_dim:
        raise CheckpointError(
            f"rope_parameters turn {dim} of {config.head_dim} numbers of a head by frequencies of "
            f"type {config.rope_parameters}; HMT computes this family with a fixed rope_type, and "
            "no more numbers than there are"
        )
    compressor = indexer = None
    if kind != _SLIDING:
        compressor, indexer = _compressor(config, kind, dim)
    heads, hidden = config.num_attention_heads, config.hidden_size
    return CompressedAttention(
        hidden,
        heads,
        config.head_dim,
        config.q_lora_rank,
        turned,
        config.sliding_window,
        config.rms_norm_eps,
        GroupedOutput(
            hidden,
            config.o_groups,
            heads * config.head_dim // config.o_groups,
            config.o_lora_rank,
        ),
        compressor,
        indexer,
    )


def _compressor(config: Config, kind: str, turning: int) -> tuple[Compressor, EntryIndexer | None]:
    selects = kind == _SELECTED
    positions = config.compress_rates.get(kind)
    even = type(positions) is int and 1 <= positions <= _MOST_POSITIONS
    if not even or (PAGE_TOKENS % positions and positions % PAGE_TOKENS):
        raise CheckpointError(
            f"compress_rates has {positions!r} for {kind}; HMT computes this family with a divisor "
            f"or a multiple of {PAGE_TOKENS}, up to {_MOST_POSITIONS}"
        )
    dims = {"head_dim": config.head_dim}
    if selects:
        dims["index_head_dim"] = config.index_head_dim
    for name, dim in dims.items():
        rows = GroupRows(positions, dim).rows
        if dim % rows or dim < turning:
            raise CheckpointError(
                f"{name} is {dim}; with entries of {positions} positions it must be a multiple of "
                f"{rows}, and {turning} numbers of it turn"
            )
    parts = [EntryPart("entry_", "compressor.", _norm(config, config.head_dim))]
    if not selects:
        return Compressor(config.hidden_size, positions, False, tuple(parts)), None
    index_norm = _norm(config, config.index_head_dim)
    parts.append(EntryPart("key_", "indexer.compressor.", index_norm))
    indexer = EntryIndexer(
        config.hidden_size,
        config.q_lora_rank,
        config.index_n_heads,
        GroupRows(positions, config.index_head_dim),
        config.index_topk,
    )
    return Compressor(config.hidden_size, positions, True, tuple(parts)), indexer


def _norm(config: Config, width: int) -> RMSNorm:
    return RMSNorm(width, config.rms_norm_eps)
