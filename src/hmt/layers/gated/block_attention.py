"""Gated attention to blocks of positions that an indexer selects (Qwen4-Exp: QSA)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.gated.gated_attention import GatedAttention
from hmt.layers.latent.mla import only
from hmt.layers.linear import Params, project
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary

_QUERIES_AT_ONCE = 64  # tokens whose selected rows are gathered together


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Scores blocks of positions for every token, and selects the best.

    A position keeps one key [dim] for all heads, which has neither norm nor rotation.  A block's
    key is the norm of the mean of its positions' keys, rotated as its first position is.  Its score
    is the sum of relu(query . key / sqrt(dim)) over the heads.  A token sees whole blocks, of which
    it attends to those that score highest, and whatever positions come behind them.

    norm       of one head's query, and of a block's key
    positions  of a block
    top_k      blocks that are selected, where a token sees more
    """

    hidden_size: int
    heads: int
    dim: int
    norm: RMSNorm
    positions: int
    top_k: int
    rotary: Rotary

    @property
    def keys(self) -> KVLayer:
        """What it keeps per token."""
        return KVLayer(KVKind.INDEX, 1, self.dim, self.dim, query_heads=self.heads)

    @property
    def most(self) -> int:
        """Positions that a token attends to at most."""
        return (self.top_k + 1) * self.positions - 1

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: queries and keys, normed and turned; int64 numbers of blocks."""
        return 4 * (self.heads + 1) * self.dim + self.heads + 2 * self.top_k

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + index_qk_proj and so on in the checkpoint."""
        shape = (self.heads + 1) * self.dim, self.hidden_size
        # VECTOR: rounding it changes which positions are selected, and it is small.
        return (
            ParamSpec("index_qk", shape, (f"{at}index_qk_proj.weight",), Role.VECTOR),
            self.norm.param("index_q_norm", f"{at}q_layernorm.weight"),
            self.norm.param("index_k_norm", f"{at}k_layernorm.weight"),
        )

    def select(
        self, x: Tensor, number: int, step: Step, params: Params, kv: KVCache
    ) -> Iterator[tuple[Segment, Tensor]]:
        """Ends of runs whose tokens see more than they attend to, and their blocks.

        Blocks are int64 [tokens, top_k], ascending.  x [tokens, hidden_size].  Appends keys of all
        tokens to layer `number` of `kv`.
        """
        heads = project(x, params, "index_qk").unflatten(1, (-1, self.dim))
        query, key = heads.split((self.heads, 1), dim=1)
        kv.append(number, step, key.contiguous(), None)
        ends = [end for run in step.segments if (end := self._selecting(run)) is not None]
        if not ends:
            return
        query = self.norm(query.contiguous(), params["index_q_norm"])
        query = ops.rope(query, *self.rotary.cos_sin(step))
        weights = torch.ones(query.shape[:2], device=x.device)
        for run in ends:
            yield (
                run,
                ops.index_topk(
                    query[run.tokens],
                    weights[run.tokens],
                    self._block_keys(kv.read(number, run)[0][:, 0].to(x.dtype), params),
                    start=run.start,
                    top_k=self.top_k,
                    scale=self.dim**-0.5,
                    positions=self.positions,
                ),
            )

    def split(self, run: Segment) -> int:
        """Tokens of a run that attend to all that they see; those behind them select."""
        return max(0, min(run.length, self.most - run.start))

    def _selecting(self, run: Segment) -> Segment | None:
        skipped = self.split(run)
        if skipped == run.length:
            return None
        length = run.length - skipped
        return replace(run, start=run.start + skipped, offset=run.offset + skipped, length=length)

    def _block_keys(self, keys: Tensor, params: Params) -> Tensor:
        """Keys of whole blocks [blocks, dim], of those of positions [positions, dim]."""
        blocks = len(keys) // self.positions
        groups = keys[: blocks * self.positions].unflatten(0, (blocks, -1)).float()
        total = groups[:, 0]
        for place in range(1, self.positions):  # in this order, however many blocks there are
            total = total + groups[:, place]
        pooled = self.norm((total / self.positions).to(keys.dtype), params["index_k_norm"])
        starts = torch.arange(blocks, device=keys.device) * self.positions
        return ops.rope(pooled[:, None], *self.rotary.at(starts))[:, 0]


@dataclass(frozen=True, slots=True)
class BlockSparseAttention:
    """Gated attention of which each token attends to some blocks, and to what is behind them."""

    gated: GatedAttention
    indexer: BlockIndexer

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token beside index keys."""
        return replace(self.gated.kv, selected=self.indexer.most)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token."""
        return self.gated.activation_width + self.indexer.activation_width

    @property
    def gathered_width(self) -> int:
        """Numbers alive besides: one token's rows, and copies of them.

        Rows of all tokens together are no more than those of the context.
        """
        return 3 * self.indexer.most * self.kv.row_width

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + q_proj, `at` + indexer.index_qk_proj and so on."""
        return (*self.gated.params(at), *self.indexer.params(f"{at}indexer."))

    def __call__(
        self, x: Tensor, layer: int, keys: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """x [tokens, hidden_size] to the same shape.  Appends to `kv`.

        keys   the number by which `kv` knows the layer's index keys
        """
        own = self.gated.attention
        heads, gates = self.gated.heads(x, step, params)
        query, key, value = heads.split((own.heads, own.kv_heads, own.kv_heads), dim=1)
        kv.append(layer, step, key, value)
        selection = list(self.indexer.select(x, keys, step, params, kv))
        out = torch.empty_like(query)
        whole = [
            replace(run, length=length) if length < run.length else run
            for run in step.segments
            if (length := self.indexer.split(run))
        ]
        if whole:
            part, rows = only(step, whole)
            out[rows] = kv.attend(layer, part, query[rows], scale=own.scale)
        for run, blocks in selection:
            for first in range(0, run.length, _QUERIES_AT_ONCE):
                self._attend(out, query, layer, run, first, blocks, kv)
        return project(ops.sigmoid_gated(out.flatten(1), gates), params, "o_proj")

    def _attend(
        self,
        out: Tensor,
        query: Tensor,
        layer: int,
        run: Segment,
        first: int,
        blocks: Tensor,
        kv: KVCache,
    ) -> None:
        """Attention of some tokens of `run`, from its `first`, to their blocks, into `out`.

        Every token attends by itself, to rows that are gathered for it, so that its result does
        not depend on how many others there are.
        """
        tokens = range(first, min(first + _QUERIES_AT_ONCE, run.length))
        wanted = [self._positions(blocks[token], run.start + token) for token in tokens]
        union = torch.cat(wanted).unique()
        key, value = (rows.to(out.dtype) for rows in kv.gather(layer, run, union))
        for token, positions in zip(tokens, wanted, strict=True):
            at = run.offset + token
            mine = torch.searchsorted(union, positions)
            out[at : at + 1], _ = ops.attention(
                query[at : at + 1],
                key[mine],
                value[mine],
                start=len(mine) - 1,
                scale=self.gated.attention.scale,
            )

    def _positions(self, blocks: Tensor, position: int) -> Tensor:
        """What a token attends to, ascending: those of its blocks, and behind the last block."""
        size = self.indexer.positions
        inside = torch.arange(size, device=blocks.device)
        tail = torch.arange((position + 1) // size * size, position + 1, device=blocks.device)
        return torch.cat(((blocks[:, None] * size + inside).flatten(), tail))
