"""What all families share: the embedding, the output layer, and the model's sizes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.units import MIB, round_up
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.model import KVLayer, LayerState, Model, ModelSpec
from hmt.contracts.sharding import RankShare
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, ResidentBlock, Weights
from hmt.kernels import fused_ops, ops
from hmt.layers import FusableLayer, FusedLayers, Params, RMSNorm, Rotary, Router, common_border
from hmt.models.config import Config, max_context, rotaries

_EMBEDDING = BlockId(TRUNK, BlockKind.EMBEDDING)
_OUTPUT = "lm_head.weight"
_NO_SOURCES: Mapping[int, int] = {}
_STAGES = "several processes compute the layers, one after another"
_HEAD_CHUNK_BYTES = 16 * MIB  # of bf16: long enough to read at full speed


class Decoder(ABC, Model):
    """Implements Model around the layers of a family.

    A family sets up its layers, then calls this constructor; it names its parameters in
    `layer_params` and computes one layer in `layer`.

    divides   what of its layers several processes may divide: see `models.sharding`
    staged    whether nothing but hidden states [tokens, hidden_size] goes from a layer to later
              ones, so that processes may have some of the layers each
    """

    divides: ClassVar[tuple[str, ...]] = ()
    staged: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype,
        *,
        norm: RMSNorm,
        kv: Sequence[KVLayer | None],
        activation_width: int,
        piece_width: int = 0,
        router: Router | None = None,
        ignored: Sequence[str] = (),
        state: Sequence[LayerState] = (),
        norm_name: str = "model.norm.weight",
        table_name: str = "model.embed_tokens.weight",
        embedding_factor: float = 1.0,
        logit_factor: float = 1.0,
        logit_softcap: float | None = None,
        tables: Sequence[BlockSpec] = (),
        uncaptured: str = "",
        kv_sources: Mapping[int, int] = _NO_SOURCES,
    ) -> None:
        """`norm` is the final norm, called `norm_name` in checkpoints; the rest is as in ModelSpec.

        `table_name` is the embedding's name there; embeddings and logits are multiplied with
        `embedding_factor` and `logit_factor`; logits are bounded by `logit_softcap`.
        `tables` are looked up besides the embedding.
        `kv` has one entry per layer; `router` is that of layers with experts, whose blocks come
        from `router_block`.
        """
        self.dtype = dtype
        self._share: RankShare | None = getattr(config, "share", None)
        self._embedding_factor, self._logit_factor = embedding_factor, logit_factor
        self._logit_softcap = logit_softcap
        self._norm = norm
        self._router = router
        self._rotaries = rotaries(config)  # of all layer types, for `angles`
        ignored = (r"rotary_emb\.inv_freq$", *ignored)
        layers = config.num_hidden_layers
        self.spec = ModelSpec(
            architecture=config.architectures[0],
            layers=layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_context=max_context(config),
            blocks=(
                *_embedding(config, table_name, self._share),
                *tables,
                *(
                    block
                    for index in range(layers)
                    for block in self.layer_params(index)
                    if _has(self._share, block.id)
                ),
                *_head(config, self.final_params(norm_name), table_name, self._share),
            ),
            kv=tuple(layer if self._computes(index) else None for index, layer in enumerate(kv)),
            activation_width=activation_width,
            piece_width=piece_width,
            attention_heads=config.num_attention_heads if any(kv) else 0,
            experts_per_token=0 if router is None else router.top_k,
            together=not self._has_sums
            and all(self.fusable_layer(index) is not None for index in range(layers)),
            ignored=ignored,
            uncaptured=_STAGES
            if self._share is not None and self._share.stages > 1
            else uncaptured,
            has_head=self._share is None or self._share.has_head,
            kv_sources=kv_sources,
            state=tuple(own if self._computes(index) else () for index, own in enumerate(state)),
            rotary_border=common_border(rotary.border for rotary in self._rotaries),
        )
        ids = [block.id for block in self.spec.blocks]
        self._head_chunks = [b for b in ids if b.kind is BlockKind.HEAD]
        self._layer_blocks: list[list[BlockId]] = [[] for _ in range(layers)]
        for block in ids:
            if block.layer != TRUNK and block.kind is not BlockKind.EXPERT:
                self._layer_blocks[block.layer].append(block)

    @property
    def _has_sums(self) -> bool:
        return self._share is not None and self._share.has_sums

    def _computes(self, index: int) -> bool:
        return self._share is None or self._share.has_layer(index)

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """Rotary positions of all layer types."""
        return self._rotaries

    @property
    def final_norm_layer(self) -> RMSNorm:
        """The norm in front of the head."""
        return self._norm

    @abstractmethod
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        """The blocks of layer `index`, in the order of use."""

    @abstractmethod
    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        """Nothing to do."""

    def final_params(self, norm_name: str) -> tuple[ParamSpec, ...]:
        """Parameters of `final_norm`; `norm_name` is the norm's in checkpoints."""
        return (self._norm.param("norm", norm_name),)

    def final_norm(self, hidden: Tensor, params: Params) -> Tensor:
        """What the head multiplies, of hidden [rows, ...]: [rows, hidden_size]."""
        return self._norm(hidden, params["norm"])

    def fusable_layer(self, index: int) -> FusableLayer | None:
        """What `layer` computes, for kernels that take many layers at once; None if unusual."""
        return None

    @override
    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> FusedLayers | None:
        if self._has_sums:
            return None
        usual = [layer for layer in map(self.fusable_layer, layers) if layer is not None]
        if len(usual) < len(layers):
            return None
        return FusedLayers.build(layers[0], usual, weights, kv)

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        rows = weights.rows(_EMBEDDING, "weight", step.token_ids).to(self.dtype)
        return rows if self._embedding_factor == 1 else rows * self._embedding_factor

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        with weights.lease(self._head_chunks[0]) as params:
            return self.final_norm(hidden, params).float()

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        return self._logits(hidden, weights, normed=False)

    def logits_of(self, normed: Tensor, weights: Weights) -> Tensor:
        """`head` of rows that another norm than the final one has normed."""
        return self._logits(normed, weights, normed=True)

    def _logits(self, hidden: Tensor, weights: Weights, *, normed: bool) -> Tensor:
        standing = weights.resident(self._head_chunks)
        if standing is not None:
            hidden = hidden if normed else self.final_norm(hidden, standing[0].params)
            return self._scaled(self._resident_head(hidden, standing, weights))
        logits = hidden.new_empty(len(hidden), self.spec.vocab_size)
        first = 0
        for chunk in self._head_chunks:
            with weights.lease(chunk) as params:
                if chunk.index == 0 and not normed:
                    hidden = self.final_norm(hidden, params)
                rows = params["weight"].shape[0]
                ops.linear_into(logits[:, first : first + rows], hidden, params["weight"])
            first += rows
        return self._scaled(logits.float())

    def _scaled(self, logits: Tensor) -> Tensor:
        logits = logits if self._logit_factor == 1 else logits * self._logit_factor
        if self._logit_softcap is None:
            return logits
        return logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)

    @override
    def angles(self, step: Step) -> tuple[int, ...]:
        kinds = tuple(rotary.kind(run) for rotary in self._rotaries for run in step.segments)
        return kinds if any(kinds) else ()

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        assert self._router is not None
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            return self._router(self._norm(hidden, params["norm"]), params).experts

    def _resident_head(
        self, hidden: Tensor, chunks: Sequence[ResidentBlock], weights: Weights
    ) -> Tensor:
        """All chunks in one call, with the same results, of normed rows."""
        names = tuple(f"weight{number}" for number in range(len(chunks)))
        params = {name: chunk.params["weight"] for name, chunk in zip(names, chunks, strict=True)}
        weights.count(sum(chunk.nbytes for chunk in chunks))
        return fused_ops.linear_many_float(hidden, params, names)

    @override
    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        return tuple(self._layer_blocks[index])


def attention_block(index: int, *params: ParamSpec) -> BlockSpec:
    """The block of layer `index` that holds its attention."""
    return BlockSpec(BlockId(index, BlockKind.ATTENTION), params)


def ffn_block(index: int, *params: ParamSpec) -> BlockSpec:
    """The block of layer `index` that holds its dense feed-forward network."""
    return BlockSpec(BlockId(index, BlockKind.FFN), params)


def router_block(index: int, *params: ParamSpec) -> BlockSpec:
    """The block of layer `index` that holds its router, and experts that all tokens share."""
    return BlockSpec(BlockId(index, BlockKind.ROUTER), params)


def expert_block(index: int, expert: int, *params: ParamSpec) -> BlockSpec:
    """The block of one routed expert of layer `index`."""
    return BlockSpec(BlockId(index, BlockKind.EXPERT, expert), params)


def head_chunk_rows(vocab_size: int, hidden_size: int) -> int:
    """Output rows in one block of the head: 16 MiB of bf16, at most about a quarter of all.

    A multiple of 128, the tile of FP8 scales.
    """
    by_bytes = _HEAD_CHUNK_BYTES // (2 * hidden_size)
    return round_up(max(1, min(by_bytes, -(-vocab_size // 4))), 128)


def _embedding(config: Config, table_name: str, share: RankShare | None) -> Iterator[BlockSpec]:
    if share is not None and not share.has_embedding:
        return
    shape = (config.vocab_size, config.hidden_size)
    sources = (table_name, _OUTPUT) if config.tie_word_embeddings else (table_name,)
    table = ParamSpec("weight", shape, sources, Role.TABLE)
    yield BlockSpec(_EMBEDDING, (table,))


def _has(share: RankShare | None, block: BlockId) -> bool:
    """Whether a rank has a layer's block."""
    if share is None:
        return True
    if share.experts is None or block.kind is not BlockKind.EXPERT:
        return share.has_layer(block.layer)
    return share.has_layer(block.layer) and share.experts.first <= block.index < share.experts.end


def _head(
    config: Config, before: Sequence[ParamSpec], table_name: str, share: RankShare | None
) -> Iterator[BlockSpec]:
    """`before`: parameters of what comes before the first product."""
    if share is not None and not share.has_head:
        return
    vocab, hidden = config.vocab_size, config.hidden_size
    # A head in the file is the head, also where the configuration ties it to the embedding, as in
    # transformers.
    sources = (_OUTPUT, table_name) if config.tie_word_embeddings else (_OUTPUT,)
    step = head_chunk_rows(vocab, hidden)
    for index, first in enumerate(range(0, vocab, step)):
        rows = (first, min(first + step, vocab))
        weight = ParamSpec("weight", (rows[1] - first, hidden), sources, rows=rows)
        params = (*before, weight) if index == 0 else (weight,)
        yield BlockSpec(BlockId(TRUNK, BlockKind.HEAD, index), params)
