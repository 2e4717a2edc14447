"""Multi-head latent attention: keys and values are kept compressed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import CHUNK_TOKENS, KVKind, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import fused_ops, ops
from hmt.kernels.backend_registry import backend_of
from hmt.kernels.fused_ops import LatentLayer
from hmt.kernels.weight_rows import rows_of, rows_together
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary

# As many are expanded at once: enough to keep a large GPU busy with 512 tokens.
_HEADS_AT_ONCE = 16
_LEAST_EXPANDED = 1024  # positions; fewer would be merged more often


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1).

    A token keeps one row: its latent [kv_rank] and one key [rope_dim] with its position, shared by
    all heads.  `kv_b_proj` makes each head's key [nope_dim] and value [value_dim] out of the
    latent.  There are two ways to the same result:

    absorbed   fold kv_b_proj into the query and the output and attend to the latents as they are:
               heads * (2 * kv_rank + rope_dim) products for each query and position
    expanded   make the keys and values of the whole context, heads * kv_rank * (nope_dim +
               value_dim) products per position, and attend to those: heads * (nope_dim + rope_dim
               + value_dim) products for each query and position

    What is as wide as all heads' absorbed queries, or expanded keys, exists for a piece at a time:
    for CHUNK_TOKENS tokens, or for _HEADS_AT_ONCE heads.

    q_rank     width of the query's own compression; None where queries are projected directly
    rope_dim   0: there are no positions, and a token's row is its latent alone
    gated      each head's result is multiplied with the sigmoid of another projection of the token
    expands    whether long runs are expanded.  Otherwise results have the same bits however a
               prompt is cut: worthwhile where only the first positions are attended to by all
    """

    hidden_size: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: Rotary
    scale: float
    interleaved: bool = False  # pairs of numbers that turn together lie side by side
    bias: bool = False  # of q_a_proj, kv_a_proj_with_mqa and o_proj
    norm_eps: float = 1e-6
    gated: bool = False
    expands: bool = True
    layer: LatentLayer = field(init=False)

    def __post_init__(self) -> None:
        options = ops.NormOptions(self.norm_eps)
        query = "q_proj" if self.q_rank is None else "q_a_proj"
        layer = LatentLayer(
            self.heads,
            self.kv_rank,
            self.nope_dim,
            self.rope_dim,
            self.value_dim,
            self.scale,
            self.interleaved,
            options,
            (query, "kv_a_proj"),
        )
        object.__setattr__(self, "layer", layer)

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token."""
        own = self.nope_dim + self.rope_dim + self.value_dim if self.expands else 0
        return KVLayer(
            KVKind.LATENT,
            1,
            self.kv_rank + self.rope_dim,
            self.kv_rank,
            expanded_dim=own,
            relative=True,
        )

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual and input, queries, results, and heads expanded."""
        query = self.nope_dim + self.rope_dim
        whole = query + self.rope_dim + self.value_dim
        expanded = 3 * query + (self.nope_dim + self.value_dim) + 3 * self.value_dim
        heads = min(self.heads, _HEADS_AT_ONCE)
        latent = self.kv_rank + self.rope_dim
        return 2 * self.hidden_size + latent + self.heads * whole + heads * expanded

    @property
    def piece_width(self) -> int:
        """Numbers alive besides per token of a piece: absorbed queries and what they find."""
        query = self.nope_dim + self.rope_dim
        return self.heads * (query + 3 * self.kv_rank + self.rope_dim + self.value_dim)

    @property
    def _longest_absorbed(self) -> float:
        """Runs of at most this many tokens need fewer products absorbed than expanded."""
        return self.kv.longest_absorbed

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + kv_a_proj_with_mqa and so on in the checkpoint."""
        hidden, latent = self.hidden_size, self.kv_rank + self.rope_dim
        query = self.heads * (self.nope_dim + self.rope_dim)
        expanded = self.heads * (self.nope_dim + self.value_dim)
        return (
            *self._query_params(at, query),
            *linear_params("kv_a_proj", latent, hidden, f"{at}kv_a_proj_with_mqa", bias=self.bias),
            self._norm(self.kv_rank).param("kv_a_norm", f"{at}kv_a_layernorm.weight"),
            self._expansion_param(expanded, f"{at}kv_b_proj.weight"),
            *self._gate_params(at),
            *linear_params(
                "o_proj", hidden, self.heads * self.value_dim, f"{at}o_proj", bias=self.bias
            ),
        )

    def _expansion_param(self, outputs: int, source: str) -> ParamSpec:
        # VECTOR where it is only absorbed, since that multiplies with numbers: unpacking 16.8
        # million of 4 bits took a core 32 ms for each token, reading them in 16 bits takes 6.
        role = Role.LINEAR if self.expands else Role.VECTOR
        return ParamSpec("kv_b_proj", (outputs, self.kv_rank), (source,), role)

    def _gate_params(self, at: str) -> tuple[ParamSpec, ...]:
        gate = (f"{at}g_proj.weight",)
        return (
            (ParamSpec("gate", (self.heads, self.hidden_size), gate, Role.VECTOR),)
            if self.gated
            else ()
        )

    def _query_params(self, at: str, outputs: int) -> tuple[ParamSpec, ...]:
        if self.q_rank is None:
            return linear_params("q_proj", outputs, self.hidden_size, f"{at}q_proj")
        return (
            *linear_params(
                "q_a_proj", self.q_rank, self.hidden_size, f"{at}q_a_proj", bias=self.bias
            ),
            self._norm(self.q_rank).param("q_a_norm", f"{at}q_a_layernorm.weight"),
            *linear_params("q_b_proj", outputs, self.q_rank, f"{at}q_b_proj"),
        )

    def add_to(
        self,
        hidden: Tensor,
        norm: RMSNorm,
        layer: int,
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> bool:
        """hidden += attention(norm(hidden)), in few launches; appends to `kv`.

        The norm's weight is `norm` of `params`.  False, and nothing done, where there is no kernel:
        only for one token of each run, on a GPU.
        """
        if self.gated or not fused_ops.has_fused_attention(hidden):
            return False
        if any(run.length > 1 for run in step.segments):
            return False
        place = kv.kernel_place(layer, step)
        if place is None:
            return False
        pages, number, runs = place
        angles = self.rotary.cos_sin(step)
        return fused_ops.add_latent_attention(
            hidden, params, self.layer, norm.options, angles, pages, number, runs
        )

    def __call__(self, x: Tensor, layer: int, step: Step, params: Params, kv: KVCache) -> Tensor:
        """x [tokens, hidden_size] to [tokens, hidden_size].  Appends to `kv`."""
        queries = self.queries(self.compressed(x, params), step, params)
        self.append(x, layer, step, params, kv)
        out = x.new_empty(len(x), self.heads, self.value_dim)
        self.attend(out, queries, layer, step, step.segments, params, kv)
        if self.gated:
            gate = project(x, params, "gate").reshape(-1, 1)
            out = ops.sigmoid_gated(out.flatten(0, 1), gate).view_as(out)
        return project(out.flatten(1), params, "o_proj")

    def compressed(self, x: Tensor, params: Params) -> Tensor:
        """What queries are made of: x, or its own compression [tokens, q_rank]."""
        if self.q_rank is None:
            return x
        return self._norm(self.q_rank)(project(x, params, "q_a_proj"), params["q_a_norm"])

    def queries(self, compressed: Tensor, step: Step, params: Params) -> tuple[Tensor, Tensor]:
        """Without positions, and with: [tokens, heads, nope_dim] and [tokens, heads, rope_dim]."""
        query = project(compressed, params, "q_proj" if self.q_rank is None else "q_b_proj")
        return self.turned(query.unflatten(-1, (self.heads, -1)), step)

    def turned(self, query: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """`queries` of heads [tokens, heads, nope_dim + rope_dim] that have no positions yet."""
        nope, turning = query.split((self.nope_dim, self.rope_dim), dim=-1)
        return nope, self._turn(turning, step)

    def append(self, x: Tensor, layer: int, step: Step, params: Params, kv: KVCache) -> None:
        """Append the latents of x [tokens, hidden_size] to `kv`."""
        compressed = project(x, params, "kv_a_proj")
        latent, shared = compressed.split((self.kv_rank, self.rope_dim), dim=-1)
        latent = self._norm(self.kv_rank)(latent, params["kv_a_norm"])
        shared = self._turn(shared[:, None], step)
        kv.append(layer, step, torch.cat((latent[:, None], shared), dim=-1), None)

    def _turn(self, heads: Tensor, step: Step) -> Tensor:
        """heads [tokens, heads, rope_dim] at their positions."""
        if not self.rope_dim:
            return heads
        return ops.rope(heads, *self.rotary.cos_sin(step), interleaved=self.interleaved)

    def attend(
        self,
        out: Tensor,
        queries: tuple[Tensor, Tensor],
        layer: int,
        step: Step,
        runs: Sequence[Segment],
        params: Params,
        kv: KVCache,
    ) -> None:
        """Attention of `runs`, each its whole context, into out [tokens, heads, value_dim].

        queries   those of `step`, of whose segments `runs` are, or beginnings of them
        """
        nope, turning = queries
        short = [run for run in runs if run.length <= self._longest_absorbed]
        for piece in _pieces(short):
            part, rows = only(step, piece)
            out[rows] = self._absorbed(nope[rows], turning[rows], layer, part, params, kv)
        for run in runs:
            if run.length > self._longest_absorbed:
                context = kv.read(layer, run)[0].to(nope.dtype)
                for heads in self._head_groups(params["kv_b_proj"]):
                    some = (run.tokens, heads)
                    whole = torch.cat((nope[some], turning[some]), dim=-1)
                    out[some] = self._expanded(whole, context, heads, run, params)

    def attend_selected(
        self,
        out: Tensor,
        queries: tuple[Tensor, Tensor],
        layer: int,
        run: Segment,
        positions: Tensor,
        params: Params,
        kv: KVCache,
    ) -> None:
        """Attention of the tokens of `run` to some positions each, into their rows of `out`.

        positions   int64 [run.length, count], each row ascending but for -1, which stand anywhere
                    in rows of tokens that attend to fewer

        Every token attends by itself, to rows that are gathered for it, so that its result does
        not depend on how many others there are.
        """
        own: Tensor | None = positions
        if run.length == 1:
            mine = positions[0]
            rows, own = kv.gather(layer, run, mine[mine >= 0])[0], None
        elif positions.numel() >= run.context:
            rows = kv.read(layer, run)[0]
        else:
            union, own = positions.unique(return_inverse=True)
            fewer = int(union[0] < 0)
            rows, own = kv.gather(layer, run, union[fewer:])[0], own - fewer
        rows = rows.to(out.dtype)
        to_key, to_value = self._expansion(params, out.dtype)
        for first in range(0, run.length, CHUNK_TOKENS):
            piece = slice(first, min(first + CHUNK_TOKENS, run.length))
            tokens = slice(run.offset + piece.start, run.offset + piece.stop)
            nope, turning = (part[tokens] for part in queries)
            query = torch.cat((fused_ops.head_products(nope, to_key), turning), dim=-1)
            mixed = query.new_empty(*query.shape[:2], self.kv_rank)
            for which, some in _equally_many(None if own is None else own[piece]):
                mixed[which] = ops.selected_attention(
                    query[which], rows, some, self.kv_rank, scale=self.scale
                )
            out[tokens] = fused_ops.head_products(mixed, to_value)

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.norm_eps)

    def _absorbed(
        self, nope: Tensor, turning: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Attention to latents: [tokens, heads, value_dim]."""
        to_key, to_value = self._expansion(params, nope.dtype)
        absorbed = fused_ops.head_products(nope, to_key)
        query = torch.cat((absorbed, turning), dim=-1)  # [tokens, heads, kv_rank + rope_dim]
        mixed = kv.attend(layer, step, query, scale=self.scale)  # [tokens, heads, kv_rank]
        return fused_ops.head_products(mixed, to_value)

    def _expansion(self, params: Params, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """From a latent to keys [heads, nope_dim, kv_rank], and to values, turned round."""
        expand = ops.dequantize(params["kv_b_proj"], dtype)
        expand = expand.unflatten(0, (self.heads, -1))  # [heads, nope_dim + value_dim, kv_rank]
        to_key, to_value = expand.split((self.nope_dim, self.value_dim), dim=1)
        return to_key, to_value.transpose(1, 2)

    def _head_groups(self, expand: WeightTensor) -> list[slice]:
        """Heads whose rows of kv_b_proj, [heads * (nope_dim + value_dim), kv_rank], stand alone."""
        rows = self.nope_dim + self.value_dim
        whole = math.lcm(rows, rows_together(expand)) // rows  # heads
        count = max(_HEADS_AT_ONCE // whole, 1) * whole
        return [slice(at, min(at + count, self.heads)) for at in range(0, self.heads, count)]

    def _expanded(
        self, query: Tensor, context: Tensor, heads: slice, run: Segment, params: Params
    ) -> Tensor:
        """Attention of query [length, some heads, dim] to expanded keys: [.., .., value_dim].

        context   [positions, 1, kv_rank + rope_dim]

        Positions before the run are expanded in pieces, so that memory does not grow with them;
        each partial result is merged, in f32, as it comes.
        """
        rows = self.nope_dim + self.value_dim
        expand = rows_of(params["kv_b_proj"], heads.start * rows, heads.stop * rows)
        edges = _edges(run, max(run.length, _LEAST_EXPANDED), together=backend_of(query).on_host)
        merged: tuple[Tensor, Tensor] | None = None
        for first, end in pairwise(edges):
            key, value = self._expand(context[first:end], expand)
            start = run.start - first
            part = ops.attention(query.float(), key, value, start=start, scale=self.scale)
            merged = part if merged is None else ops.merge_attention((merged, part))
        assert merged is not None
        return merged[0].to(query.dtype)

    def _expand(self, rows: Tensor, expand: WeightTensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads from rows [positions, 1, kv_rank + rope_dim]."""
        latent, shared = rows.split((self.kv_rank, self.rope_dim), dim=-1)
        both = ops.linear(latent.flatten(1), expand)
        both = both.unflatten(-1, (-1, self.nope_dim + self.value_dim))
        nope, value = both.split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, shared.expand(-1, nope.shape[1], -1)), dim=-1), value


def _equally_many(own: Tensor | None) -> Iterator[tuple[Tensor | slice, Tensor | None]]:
    """Tokens that attend to as many rows each, and these: of `own` [tokens, count] without -1."""
    if own is None or own.min() >= 0:
        yield slice(None), own
        return
    there = own >= 0
    counts = there.sum(1)
    for count in counts.unique().tolist():
        which = (counts == count).nonzero().flatten()
        yield which, own[which][there[which]].view(len(which), count)


def _edges(run: Segment, most: int, *, together: bool) -> list[int]:
    """Where pieces of up to `most` positions begin, and the last one ends.

    together   a piece may have positions before the run and its own; a GPU was measured with apart
    """
    before = list(range(0, run.start, most))
    if together and before and run.context - before[-1] <= most:
        return [*before, run.context]
    return [*before, run.start, run.context]


def _pieces(runs: Sequence[Segment]) -> list[list[Segment]]:
    """Runs by up to CHUNK_TOKENS tokens, longer ones cut."""
    pieces: list[list[Segment]] = []
    room = 0
    for run in runs:
        for at in range(0, run.length, CHUNK_TOKENS):
            length = min(CHUNK_TOKENS, run.length - at)
            if length > room:
                pieces.append([])
                room = CHUNK_TOKENS
            cut = replace(run, start=run.start + at, offset=run.offset + at, length=length)
            pieces[-1].append(run if length == run.length else cut)
            room -= length
    return pieces


def only(step: Step, runs: list[Segment]) -> tuple[Step, Tensor | slice]:
    """A step of some of a step's runs, and where its tokens are in the step they come from."""
    if runs == list(step.segments):
        return step, slice(None)
    where = step.positions.device
    tokens = [torch.arange(run.offset, run.offset + run.length, device=where) for run in runs]
    rows = torch.cat(tokens)
    moved, offset = [], 0
    for run in runs:
        moved.append(replace(run, offset=offset))
        offset += run.length
    part = Step(step.token_ids[rows], step.positions[rows], tuple(moved), rows[:0])
    return part, rows
