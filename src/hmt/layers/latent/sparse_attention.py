"""Latent attention to the positions that an indexer selects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.latent.mla import LatentAttention
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.rope import Rotary

_NORM_EPS = 1e-6  # of index keys, in all families


class SelectedRun(NamedTuple):
    """The last tokens of a run, which see more positions than they attend to.

    positions   int64 [run.length, top_k]: those that each attends to, ascending
    """

    run: Segment
    positions: Tensor


# What the tokens of a step attend to; those of no SelectedRun attend to all that they see.
Selection = Sequence[SelectedRun]


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores every position for every token, and selects the best (DeepSeek-V3.2, section 2.1).

    A position keeps one key [dim] for all heads.  Its score for a token is the sum of
    weight * relu(query . key / sqrt(dim)) over the indexer's heads, with weights of the token.

    q_rank        width of the compressed queries that the indexer's are made of
    rope_dim      the first numbers of a query and a key, which turn
    top_k         positions that are selected, where a token sees more
    interleaved   pairs of numbers that turn together lie side by side
    """

    hidden_size: int
    q_rank: int
    heads: int
    dim: int
    rope_dim: int
    top_k: int
    rotary: Rotary
    interleaved: bool

    @property
    def keys(self) -> KVLayer:
        """What it keeps per token."""
        return KVLayer(KVKind.INDEX, 1, self.dim, self.dim, query_heads=self.heads)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: queries, turned ones, keys, weights, and positions in int64."""
        return 3 * self.heads * self.dim + 4 * self.dim + 2 * self.heads + 4 * self.top_k

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wq_b and so on in the checkpoint."""
        # VECTOR: rounding them changes which positions are selected, and they are small.
        weights = (f"{at}weights_proj.weight",)
        return (
            *linear_params("index_query", self.heads * self.dim, self.q_rank, f"{at}wq_b"),
            *linear_params("index_key", self.dim, self.hidden_size, f"{at}wk"),
            ParamSpec("index_norm", (self.dim,), (f"{at}k_norm.weight",), Role.VECTOR),
            ParamSpec("index_norm_bias", (self.dim,), (f"{at}k_norm.bias",), Role.VECTOR),
            ParamSpec("index_weights", (self.heads, self.hidden_size), weights, Role.VECTOR),
        )

    def select(
        self, x: Tensor, compressed: Tensor, number: int, step: Step, params: Params, kv: KVCache
    ) -> Selection:
        """What the tokens of a step attend to.  Appends their keys to layer `number` of `kv`.

        x [tokens, hidden_size]; compressed [tokens, q_rank].
        """
        key = project(x, params, "index_key").float()
        norm, bias = (params[name].data.float() for name in ("index_norm", "index_norm_bias"))
        key = torch.nn.functional.layer_norm(key, (self.dim,), norm, bias, _NORM_EPS).to(x.dtype)
        kv.append(number, step, self._turned(key[:, None], step), None)
        ends = [end for run in step.segments if (end := self._selecting(run)) is not None]
        if not ends:
            return ()
        query = project(compressed, params, "index_query").unflatten(-1, (self.heads, -1))
        query = self._turned(query, step)
        weights = ops.linear(x.float(), params["index_weights"]) * self.heads**-0.5
        return [
            SelectedRun(
                run,
                select_positions(
                    query[run.tokens],
                    weights[run.tokens],
                    number,
                    run,
                    step,
                    kv,
                    top_k=self.top_k,
                    scale=self.dim**-0.5,
                ),
            )
            for run in ends
        ]

    def _selecting(self, run: Segment) -> Segment | None:
        """The part of a run whose tokens see more than they select."""
        first = max(run.start, self.top_k)
        if first >= run.context:
            return None
        skipped = first - run.start
        return replace(run, start=first, offset=run.offset + skipped, length=run.length - skipped)

    def _turned(self, heads: Tensor, step: Step) -> Tensor:
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
    """Latent attention of which each token attends to `top_k` positions at most.

    What is selected may also come from an earlier layer, whose indexer then serves several.
    """

    latent: LatentAttention
    indexer: Indexer

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token beside index keys."""
        return replace(self.latent.kv, selected=self.indexer.top_k)

    @property
    def gathered_width(self) -> int:
        """Numbers alive besides, of one token: rows that it selects, and copies in pages."""
        return self.indexer.top_k * (2 * self.kv.key_dim + self.kv.value_dim)

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
            selection = self.indexer.select(x, compressed, keys, step, params, kv)
        out = x.new_empty(len(x), latent.heads, latent.value_dim)
        whole = [begin for run in step.segments if (begin := self._seeing_all(run)) is not None]
        latent.attend(out, queries, layer, step, whole, params, kv)
        for run, positions in selection:
            where = positions.to(x.device)
            latent.attend_selected(out, queries, layer, run, where, params, kv)
        return out.flatten(1), selection

    def _seeing_all(self, run: Segment) -> Segment | None:
        """The part of a run whose tokens attend to all that they see."""
        length = min(run.length, self.indexer.top_k - run.start)
        if length <= 0:
            return None
        return run if length == run.length else replace(run, length=length)
