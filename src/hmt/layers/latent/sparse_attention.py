"""Latent attention to the positions that an indexer selects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer, LayerState
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.compressed.compressor import GroupMeans, GroupRows
from hmt.layers.latent.mla import LatentAttention
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.rope import Rotary

_NORM_EPS = 1e-6  # of index keys, in all families


class SelectedRun(NamedTuple):
    """The last tokens of a run, which see more positions than they attend to.

    positions   int64 [run.length, count]: those that each attends to, ascending but for -1, which
                stand anywhere in rows of tokens that attend to fewer
    """

    run: Segment
    positions: Tensor


# What the tokens of a step attend to; those of no SelectedRun attend to all that they see.
Selection = Sequence[SelectedRun]


@dataclass(frozen=True, slots=True)
class KeyPool:
    """One index key for some positions that follow one another (GLM-5.3: "kpool").

    It is their keys' weighted average, number by number: weights are a softmax over the positions,
    of a projection of each token and of what is learned for its place among them.

    size   positions that share a key; the last ones of a sequence, which are fewer, have none
    """

    hidden_size: int
    dim: int
    size: int

    @property
    def rows(self) -> GroupRows:
        """How keys lie in the KV cache."""
        return GroupRows(self.size, self.dim)

    @property
    def averages(self) -> GroupMeans:
        """What makes the keys."""
        return GroupMeans(self.size, self.dim)

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence: the average that has begun."""
        return self.averages.state

    @property
    def activation_width(self) -> int:
        """Numbers alive per token."""
        return self.averages.activation_width

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + index_kpool_compress_gate and so on in the checkpoint."""
        # VECTOR: rounding them changes which positions are selected, and they are small.
        shapes = {"gate": (self.dim, self.hidden_size), "ape": (self.size, self.dim)}
        return tuple(
            ParamSpec(
                f"index_pool_{name}", shape, (f"{at}index_kpool_compress_{name}",), Role.VECTOR
            )
            for name, shape in shapes.items()
        )

    def append(
        self,
        x: Tensor,
        key: Tensor,
        layer: int,
        number: int,
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> None:
        """Average the keys [tokens, dim] of tokens x; append what is known to layer `number`.

        Advances the recurrent state of `layer`.
        """
        places = step.positions % self.size
        wanted = ops.linear(x.float(), params["index_pool_gate"])
        wanted = wanted + params["index_pool_ape"].data.float()[places]
        known = self.averages(key.float()[:, None], wanted[:, None], layer, step, kv)
        self.rows.append(number, step, known, kv, x)

    def attended(self, pools: Tensor, run: Segment) -> Tensor:
        """Positions that tokens of `run` attend to: int64 [run.length, count], or -1 for none.

        pools   int64 [run.length, some], ascending: those that each selects; it attends besides to
                what it sees behind the last whole pool
        """
        places = torch.arange(self.size, device=pools.device)
        inside = (pools[..., None] * self.size + places).flatten(1)
        ends = torch.arange(run.start + 1, run.context + 1, device=pools.device)[:, None]
        behind = ends // self.size * self.size + places[:-1]
        return torch.cat((inside, behind.masked_fill(behind >= ends, -1)), dim=1)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores every position for every token, and selects the best (DeepSeek-V3.2, section 2.1).

    A position keeps one key [dim] for all heads.  Its score for a token is the sum of
    weight * relu(query . key / sqrt(dim)) over the indexer's heads, with weights of the token.

    q_rank        width of the compressed queries that the indexer's are made of
    rope_dim      the first numbers of a query and a key, which turn; 0: none do
    top_k         positions that are selected, where a token sees more; a multiple of a pool's
    interleaved   pairs of numbers that turn together lie side by side
    pool          positions that share a key, and are selected together; None: each has its own
    """

    hidden_size: int
    q_rank: int
    heads: int
    dim: int
    rope_dim: int
    top_k: int
    rotary: Rotary
    interleaved: bool
    pool: KeyPool | None = None

    @property
    def keys(self) -> KVLayer:
        """What it keeps per token."""
        if self.pool is not None:
            return self.pool.rows.kv(KVKind.INDEX, self.heads)
        return KVLayer(KVKind.INDEX, 1, self.dim, self.dim, query_heads=self.heads)

    @property
    def most(self) -> int:
        """Positions that a token attends to at most: those of the last, broken pool as well."""
        return self.top_k if self.pool is None else self.top_k + self.pool.size - 1

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: queries, turned ones, keys, weights, and positions in int64."""
        keys = 4 * self.dim + (0 if self.pool is None else self.pool.activation_width)
        return 3 * self.heads * self.dim + keys + 2 * self.heads + 4 * self.most

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wq_b and so on in the checkpoint."""
        # VECTOR: rounding them changes which positions are selected, and they are small.
        weights = (f"{at}weights_proj.weight",)
        return (
            *(() if self.pool is None else self.pool.params(at)),
            *linear_params("index_query", self.heads * self.dim, self.q_rank, f"{at}wq_b"),
            *linear_params("index_key", self.dim, self.hidden_size, f"{at}wk"),
            ParamSpec("index_norm", (self.dim,), (f"{at}k_norm.weight",), Role.VECTOR),
            ParamSpec("index_norm_bias", (self.dim,), (f"{at}k_norm.bias",), Role.VECTOR),
            ParamSpec("index_weights", (self.heads, self.hidden_size), weights, Role.VECTOR),
        )

    def select(
        self,
        x: Tensor,
        compressed: Tensor,
        layer: int,
        number: int,
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> Selection:
        """What the tokens of a step attend to.  Appends their keys to layer `number` of `kv`.

        x [tokens, hidden_size]; compressed [tokens, q_rank].  Of a pool, advances state of `layer`.
        """
        key = project(x, params, "index_key").float()
        norm, bias = (params[name].data.float() for name in ("index_norm", "index_norm_bias"))
        key = torch.nn.functional.layer_norm(key, (self.dim,), norm, bias, _NORM_EPS).to(x.dtype)
        key = self._turned(key[:, None], step)
        if self.pool is None:
            kv.append(number, step, key, None)
        else:
            self.pool.append(x, key[:, 0], layer, number, step, params, kv)
        ends = [end for run in step.segments if (end := self._selecting(run)) is not None]
        if not ends:
            return ()
        query = project(compressed, params, "index_query").unflatten(-1, (self.heads, -1))
        query = self._turned(query, step)
        weights = ops.linear(x.float(), params["index_weights"]) * self.heads**-0.5
        return [
            SelectedRun(
                run,
                self._selected(
                    query[run.tokens], weights[run.tokens], number, run, step, params, kv
                ),
            )
            for run in ends
        ]

    def _selected(
        self,
        query: Tensor,
        weights: Tensor,
        number: int,
        run: Segment,
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> Tensor:
        """What tokens of `run` attend to; query [run.length, heads, dim], weights [.., heads]."""
        scale = self.dim**-0.5
        if self.pool is None:
            return select_positions(
                query, weights, number, run, step, kv, top_k=self.top_k, scale=scale
            )
        size = self.pool.size
        keys = self.pool.rows.read_all(number, run, kv, query.device)
        pools = ops.index_topk(
            query,
            weights,
            keys.to(query.dtype),
            start=run.start,
            top_k=self.top_k // size,
            scale=scale,
            positions=size,
        )
        return self.pool.attended(pools, run)

    def _selecting(self, run: Segment) -> Segment | None:
        """The part of a run whose tokens see more than they select."""
        first = max(run.start, self.most)
        if first >= run.context:
            return None
        skipped = first - run.start
        return replace(run, start=first, offset=run.offset + skipped, length=run.length - skipped)

    def _turned(self, heads: Tensor, step: Step) -> Tensor:
        if not self.rope_dim:
            return heads
        cos, sin = self.rotary.cos_sin(step)
        turning, rest = heads.split((self.rope_dim, self.dim - self.rope_dim), dim=-1)
        return torch.cat((ops.rope(turning, cos, sin, interleaved=self.interleaved), rest), dim=-1)


def select_positions(
    query: Tensor,
    weights: Tensor,
    number: int,
    run: Segment,
    step: Step,
    kv: KVCache,
    *,
    top_k: int,
    scale: float,
) -> Tensor:
    """The positions that the tokens of `run` score highest: int64 [run.length, top_k].

    query [run.length, heads, dim]; weights f32 [run.length, heads]; `number` of the layer of keys.
    Keys are read where they lie, or copied where their pages are in several places.
    """
    place = kv.kernel_place(number, step)
    if place is None:
        keys = kv.read(number, run)[0][:, 0]
        return ops.index_topk(query, weights, keys, start=run.start, top_k=top_k, scale=scale)
    pages, slot, metadata = place
    at = next(i for i, one in enumerate(step.segments) if one.sequence == run.sequence)
    table = metadata.runs[at].table
    return ops.paged_index_topk(
        query, weights, pages, slot, table, start=run.start, top_k=top_k, scale=scale
    )


@dataclass(frozen=True, slots=True)
class SparseLatentAttention:
    """Latent attention of which each token attends to `most` positions of its indexer at most.

    What is selected may also come from an earlier layer, whose indexer then serves several.
    """

    latent: LatentAttention
    indexer: Indexer

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token beside index keys."""
        return replace(self.latent.kv, selected=self.indexer.most)

    @property
    def gathered_width(self) -> int:
        """Numbers alive besides, of one token: rows that it selects, and copies in pages."""
        return self.indexer.most * (2 * self.kv.key_dim + self.kv.value_dim)

    def __call__(
        self,
        x: Tensor,
        layer: int,
        keys: int,
        step: Step,
        params: Params,
        kv: KVCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        """x [tokens, hidden_size] to [tokens, hidden_size], and what was selected.

        keys        the number by which `kv` knows the layer's index keys
        selection   that of an earlier layer; None: the layer's own indexer selects

        Appends to `kv`.
        """
        compressed = self.latent.compressed(x, params)
        queries = self.latent.queries(compressed, step, params)
        out, selection = self.attend(
            x, compressed, queries, layer, keys, step, params, kv, selection
        )
        return project(out, params, "o_proj"), selection

    def attend(
        self,
        x: Tensor,
        compressed: Tensor,
        queries: tuple[Tensor, Tensor],
        layer: int,
        keys: int,
        step: Step,
        params: Params,
        kv: KVCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        """What heads find, [tokens, heads * value_dim], by queries that are made already."""
        latent = self.latent
        latent.append(x, layer, step, params, kv)
        if selection is None:
            selection = self.indexer.select(x, compressed, layer, keys, step, params, kv)
        out = x.new_empty(len(x), latent.heads, latent.value_dim)
        whole = [begin for run in step.segments if (begin := self._seeing_all(run)) is not None]
        latent.attend(out, queries, layer, step, whole, params, kv)
        for run, positions in selection:
            where = positions.to(x.device)
            latent.attend_selected(out, queries, layer, run, where, params, kv)
        return out.flatten(1), selection

    def _seeing_all(self, run: Segment) -> Segment | None:
        """The part of a run whose tokens attend to all that they see."""
        length = min(run.length, self.indexer.most - run.start)
        if length <= 0:
            return None
        return run if length == run.length else replace(run, length=length)
