"""Qwen4-Exp (Qwen3.8-Flash-Next): delta nets, attention to selected blocks, n-grams from a table.

Between layers there are several residual streams, and nothing else: see `GatedResidual`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.base.units import round_up
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import (
    BlockIndexer,
    BlockSparseAttention,
    GatedAttention,
    GatedDeltaNet,
    GatedResidual,
    NGramHash,
    NGramMemory,
    Params,
    RMSNorm,
    SoftmaxRouter,
    StreamNorm,
    project,
    request_experts,
    routed_experts,
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
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block
from hmt.models.hybrid import caches_by_layer, convolution_taps
from hmt.models.linear_attention.qwen3_next import delta_heads

_MOST_REACH = 63  # of a convolution over time, in tokens before its own: what kernels hold
_MOST_STREAMS = 64
_MOST_ROWS = 1 << 31  # of one hash of n-grams, a hundred times what is published
_MOST_HASHES = 512  # of all tables: each has a prime of its own, which is looked for
_NOT_CAPTURED = (
    "an indexer selects what tokens attend to, each step gathers other rows, and rows of the "
    "n-gram table are found by the tokens"
)


class Qwen4Exp(Decoder):
    """Each layer has a delta net or attention, routed experts, and one that all tokens share."""

    staged = False

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        require(config, "output_gate_type", "silu", "sigmoid", None)
        _check_counts(config)
        kinds = layer_kinds(config, "indexed_attention", "linear_attention")
        self._attends = [kind == "indexed_attention" for kind in kinds]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        streams = StreamNorm(config.hc_count, norm)
        rank = config.hc_lowrank
        self._mixer_residual = GatedResidual(streams, rank, "mixer_residual_")
        self._expert_residual = GatedResidual(streams, rank, "expert_residual_")
        self._final = GatedResidual(streams, rank, "norm_", writes=False)
        self._attention = _attention(config, norm)
        self._delta = GatedDeltaNet(
            config.hidden_size,
            delta_heads(config),
            None,
            convolution_taps(config, "linear_conv_kernel_dim"),
            config.rms_norm_eps,
            grouped=False,
            sigmoid=config.output_gate_type == "sigmoid",
        )
        check_experts(config, config.num_experts)
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        self._experts = SoftmaxRouter(
            hidden, config.num_experts, top_k, renormalise=config.norm_topk_prob
        )
        self._shared = gated_ffn(config, config.shared_expert_intermediate_size, prefix="shared_")
        self._expert = gated_ffn(config, config.moe_intermediate_size)
        self._memories = _memories(config, streams)
        self._hidden_size = hidden
        # Rows of the last step's tokens, by layer, which are found before it leaves host memory.
        self._row_ids: tuple[tuple[Segment, ...], dict[int, Tensor]] = ((), {})
        width = max(part.activation_width for part in (self._attention, self._delta))
        sparse = 2 * hidden + self._shared.activation_width
        width = max(width, sparse, self._expert.activation_width)
        width = max([width, *(m.activation_width for m in self._memories.values())])
        # Rows of all tables wait for their layers from the beginning of a step.
        width += sum(memory.rows_width for memory in self._memories.values())
        super().__init__(
            config,
            dtype,
            norm=norm,
            norm_name="model.hyper_connection_mixer.",
            **caches_by_layer(self._attends, self._attention.kv, self._delta.state),
            activation_width=width + self._mixer_residual.activation_width,
            router=self._experts,
            # Factors and ranges of hashes are computed, as where the checkpoint was made.
            ignored=(r"^mtp\.", r"ple_embedding\.(layer_multipliers|ngram_heads_\w+)$"),
        )
        self._complete_spec(config)

    def _complete_spec(self, config: Config) -> None:
        """Tables of n-grams, and what layers keep of a sequence besides."""
        if self.spec.rotary_border is not None:
            raise CheckpointError(
                "rotary frequencies that depend on the length of a sequence; HMT computes this "
                "family with those of a fixed rope_type only"
            )
        tables, lookups = [], {}
        for index, memory in self._memories.items():
            rows = round_up(memory.hashed.rows, config.make_ngram_vocab_size_divisible_by)
            at = f"model.layers.{index}.ple.ple_embedding.ngram_embedding.weight"
            table = ParamSpec("weight", (rows, memory.row_width), (at,), Role.TABLE)
            tables.append(BlockSpec(_table(index), (table,)))
            lookups[_table(index)] = memory.hashed.rows_per_token
        keys = self._attention.indexer.keys
        self.spec = replace(
            self.spec,
            blocks=(self.spec.blocks[0], *tables, *self.spec.blocks[1:]),
            index_keys=tuple(keys if attends else None for attends in self._attends),
            second_state=tuple(
                self._memories[index].state if index in self._memories else ()
                for index in range(self.spec.layers)
            )
            if self._memories
            else (),
            token_window=max((m.hashed.longest - 1 for m in self._memories.values()), default=0),
            row_lookups=lookups,
            gathered_width=self._attention.gathered_width,
            uncaptured=_NOT_CAPTURED,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        if self._attends[index]:
            mixer = self._attention.params(f"{at}self_attn.")
        else:
            mixer = self._delta.params(f"{at}linear_attn.")
        memory = self._memories.get(index)
        yield attention_block(
            index,
            *(() if memory is None else memory.params(f"{at}ple.")),
            *self._mixer_residual.params(f"{at}attn_hyper_connection."),
            *mixer,
        )
        gate = (f"{at}mlp.shared_expert_gate.weight",)
        yield router_block(
            index,
            *self._expert_residual.params(f"{at}mlp_hyper_connection."),
            *self._experts.params(f"{at}mlp.gate"),
            ParamSpec("shared_gate", (1, self._hidden_size), gate, Role.VECTOR),
            *self._shared.params(f"{at}mlp.shared_expert."),
        )
        for expert in range(self._experts.experts):
            yield expert_block(index, expert, *self._expert.params(f"{at}mlp.experts.{expert}."))

    @override
    def final_params(self, norm_name: str) -> tuple[ParamSpec, ...]:
        return self._final.params(norm_name)

    @override
    def final_norm(self, hidden: Tensor, params: Params) -> Tensor:
        return self._final.read(hidden, params)[0]

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        ids = {index: memory.hashed.row_ids(step) for index, memory in self._memories.items()}
        self._row_ids = step.segments, ids
        for index, rows in ids.items():
            weights.request_rows(_table(index), "weight", rows.flatten())
        return super().embed(step, weights).repeat(1, self._final.norm.streams)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            if (memory := self._memories.get(index)) is not None:
                runs, found = self._row_ids
                ids = found[index] if runs is step.segments else memory.hashed.row_ids(step)
                rows = weights.rows(_table(index), "weight", ids.flatten())
                rows = rows.view(len(ids), -1).to(hidden)
                number = self.spec.index_layer(index)
                hidden = hidden + memory(hidden, rows, number, step, params, kv)
            x, normed = self._mixer_residual.read(hidden, params)
            if self._attends[index]:
                keys = self.spec.index_layer(index)
                x = self._attention(x, index, keys, step, params, kv)
            else:
                x = self._delta(x, index, step, params, kv)
            hidden = self._mixer_residual.write(hidden, x, normed, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, normed = self._expert_residual.read(hidden, params)
            routing = self._experts(x, params)
            # On their way while the shared one computes.
            request_experts(x, routing, hidden, index, self._expert, weights)
            gate = project(x, params, "shared_gate")
            shared = ops.sigmoid_gated(self._shared(x, params), gate)
            x = routed_experts(x, routing, index, self._expert, weights) + shared
            return self._expert_residual.write(hidden, x, normed, params)

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, _ = self._expert_residual.read(hidden, params)
            return self._experts(x, params).experts


def _table(index: int) -> BlockId:
    """The table of n-grams of layer `index`; that of tokens is number 0."""
    return BlockId(TRUNK, BlockKind.EMBEDDING, index + 1)


def _check_counts(config: Config) -> None:
    """Raise CheckpointError for sizes of this family that cannot be."""
    most: dict[str, int] = {"hc_count": _MOST_STREAMS, "hc_lowrank": 1 << 20}
    most |= dict.fromkeys(("indexer_n_heads", "indexer_head_dim"), 1 << 16)
    most |= dict.fromkeys(("indexer_compress_ratio", "indexer_budget"), 1 << 30)
    if config.ple_layer_ids:
        most |= {"ple_embed_dim": 1 << 20, "ple_conv_kernel_size": _MOST_REACH + 1}
        most |= {"ngram_size": 16, "heads_per_ngram": 64}
        most |= {"ngram_vocab_size_base": _MOST_ROWS}
        most |= {"make_ngram_vocab_size_divisible_by": _MOST_ROWS}
    for name, limit in most.items():
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(f"{name} is {value!r}; it must be from 1 to {limit}")
    tables = len(config.ple_layer_ids)
    hashes = tables and tables * config.heads_per_ngram * (config.ngram_size - 1)
    if hashes > _MOST_HASHES:
        raise CheckpointError(
            f"{tables} layers with n-grams of {config.ngram_size} tokens and "
            f"{config.heads_per_ngram} hashes for each length are {hashes} hashes; HMT finds rows "
            f"for {_MOST_HASHES} at most"
        )
    require(config, "indexer_kv_heads", 1)
    if config.indexer_budget % config.indexer_compress_ratio:
        raise CheckpointError(
            f"indexer_budget {config.indexer_budget} is no multiple of indexer_compress_ratio "
            f"{config.indexer_compress_ratio}"
        )


def _attention(config: Config, norm: RMSNorm) -> BlockSparseAttention:
    turned, bias = rotary(config), config.attention_bias
    if len(turned.frequencies(1)) * 2 > config.indexer_head_dim:
        raise CheckpointError(
            f"indexer_head_dim is {config.indexer_head_dim}, but "
            f"{len(turned.frequencies(1)) * 2} numbers of it turn"
        )
    head_norm = replace(norm, width=head_dim(config))
    own: dict[str, Any] = {"bias": bias, "output_bias": bias, "head_norm": head_norm}
    ratio = config.indexer_compress_ratio
    return BlockSparseAttention(
        GatedAttention(attention(config, turned, norm=norm, **own)),
        BlockIndexer(
            config.hidden_size,
            config.indexer_n_heads,
            config.indexer_head_dim,
            replace(norm, width=config.indexer_head_dim),
            ratio,
            config.indexer_budget // ratio,
            turned,
        ),
    )


def _memories(config: Config, streams: StreamNorm) -> dict[int, NGramMemory]:
    """N-gram memories by layer.  Raises CheckpointError where their sizes do not go together."""
    found = {}
    for number, layer in enumerate(config.ple_layer_ids):
        eos = config.eos_token_id
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if (
            type(eos) is not int
            or config.ngram_size < 2
            or not 1 <= layer <= len(config.layer_types)
        ):
            raise CheckpointError(
                f"n-grams of {config.ngram_size} tokens in layer {layer!r} of "
                f"{len(config.layer_types)}, with end-of-text token {eos!r}: n-grams have two "
                "tokens at least, layers count from 1, and the token must be known"
            )
        hashed = NGramHash(
            config.ngram_size,
            config.heads_per_ngram,
            config.vocab_size,
            number,
            config.ngram_vocab_size_base,
            config.seed,
            eos,
        )
        memory = NGramMemory(hashed, streams, config.ple_embed_dim, config.ple_conv_kernel_size)
        if memory.width % hashed.rows_per_token or memory.reach > _MOST_REACH:
            raise CheckpointError(
                f"ple_embed_dim {memory.width} for {hashed.rows_per_token} rows of a token, and a "
                f"convolution that reaches back {memory.reach} tokens; rows must be equally wide, "
                f"and the reach is {_MOST_REACH} at most"
            )
        found[layer - 1] = memory
    return found
