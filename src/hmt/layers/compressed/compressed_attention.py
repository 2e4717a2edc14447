"""Attention of all heads to one row per position of a window, and to entries before it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.compressed.compressor import Compressor, GroupRows
from hmt.layers.compressed.entry_indexer import EntryIndexer
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary

_QUERIES_AT_ONCE = 64  # tokens whose selected rows are gathered together


@dataclass(frozen=True, slots=True)
class GroupedOutput:
    """What heads found becomes a hidden state by way of fewer numbers for each group of heads.

    rank   numbers of a group
    """

    hidden_size: int
    groups: int
    group_width: int
    rank: int

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wo_a, which has the rows of all groups, and wo_b."""
        shape, source = (self.rank, self.group_width), (f"{at}wo_a.weight",)
        own = (
            ParamSpec(f"o_a{n}", shape, source, rows=(n * self.rank, (n + 1) * self.rank))
            for n in range(self.groups)
        )
        width = self.groups * self.rank
        return (*own, *linear_params("o_b", self.hidden_size, width, f"{at}wo_b"))

    def __call__(self, found: Tensor, params: Params) -> Tensor:
        """found [tokens, groups * group_width] to [tokens, hidden_size]."""
        parts = enumerate(found.split(self.group_width, dim=1))
        narrow = torch.cat([project(p.contiguous(), params, f"o_a{n}") for n, p in parts], dim=1)
        return project(narrow, params, "o_b")


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention whose keys are values, one for all heads (DeepSeek-V4, section 2.3).

    A token attends to the last `window` positions, its own included; to entries that each stand
    for several positions, if there is a compressor: all that are known, or those that an indexer
    selects; and to a sink.  Keys turn, so what is found is turned back by the token's position.

    q_rank       width of the compressed queries
    rotary       of the last numbers of a head
    eps          of norms of queries and keys
    compressor   its first part makes entries, its second an indexer's keys
    """

    hidden_size: int
    heads: int
    head_dim: int
    q_rank: int
    rotary: Rotary
    window: int
    eps: float
    output: GroupedOutput
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token beside entries."""
        return KVLayer(KVKind.LATENT, 1, self.head_dim, self.head_dim, self.window)

    @property
    def rows(self) -> GroupRows | None:
        """How entries lie in the KV cache."""
        if self.compressor is None:
            return None
        return GroupRows(self.compressor.positions, self.head_dim)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: of all parts, of queries in four stages, a row in three."""
        width = 4 * self.heads * self.head_dim + 3 * self.head_dim + 2 * self.q_rank
        width += 2 * self.hidden_size + self.output.groups * self.output.rank
        if self.compressor is not None:
            width += self.compressor.activation_width
        return width + (0 if self.indexer is None else self.indexer.activation_width)

    def gathered_width(self, context: int) -> int:
        """Numbers alive besides: rows behind so many positions, and copies; those of one token."""
        entries = 0 if self.compressor is None else context // self.compressor.positions
        own = entries
        if self.indexer is not None:
            own = min(entries, self.indexer.top_k)
            entries = min(entries, _QUERIES_AT_ONCE * own)
        return 3 * self.head_dim * (2 * self.window + entries + own)

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wq_a and so on in the checkpoint."""
        width, norms = self.heads * self.head_dim, (f"{at}kv_norm.weight", f"{at}norm.weight")
        found = [
            *linear_params("q_a", self.q_rank, self.hidden_size, f"{at}wq_a"),
            RMSNorm(self.q_rank, self.eps).param("q_norm", f"{at}q_norm.weight"),
            *linear_params("q_b", width, self.q_rank, f"{at}wq_b"),
            *linear_params("kv", self.head_dim, self.hidden_size, f"{at}wkv"),
            ParamSpec("kv_norm", (self.head_dim,), norms, Role.VECTOR),
            ParamSpec("sinks", (self.heads,), (f"{at}attn_sink",), Role.VECTOR),
            *self.output.params(at),
        ]
        if self.compressor is not None:
            found += self.compressor.params(at)
        if self.indexer is not None:
            found += self.indexer.params(f"{at}indexer.")
        return tuple(found)

    def __call__(
        self,
        x: Tensor,
        layer: int,
        numbers: tuple[int, int],
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> Tensor:
        """x [tokens, hidden_size] to the same shape.  Appends to `kv`.

        numbers   by which `kv` knows the layer's index keys, and its entries
        """
        cos, sin = self.rotary.cos_sin(step)
        norm = RMSNorm(self.q_rank, self.eps)
        compressed = norm(project(x, params, "q_a"), params["q_norm"])
        query = project(compressed, params, "q_b").unflatten(1, (self.heads, -1))
        ones = torch.ones(self.head_dim, dtype=x.dtype, device=x.device)
        query = _turned(ops.rms_norm(query, ones, self.eps), cos, sin)
        row = RMSNorm(self.head_dim, self.eps)(project(x, params, "kv"), params["kv_norm"])
        kv.append(layer, step, _turned(row[:, None], cos, sin), None)
        if self.compressor is not None:
            self._append_entries(x, layer, numbers, step, params, kv)
        selected: list[tuple[Segment, Tensor] | None] = [None] * len(step.segments)
        if self.indexer is not None:
            wanted = _turned(self.indexer.queries(compressed, params), cos, sin)
            chosen = self.indexer.select(x, wanted, numbers[0], step.segments, params, kv)
            selected = list(chosen)
        sinks = params["sinks"].data.float().contiguous()
        out = torch.empty_like(query)
        for run, selection in zip(step.segments, selected, strict=True):
            self._attend(out, query, layer, numbers[1], run, selection, sinks, kv)
        return self.output(_turned_back(out, cos, sin).flatten(1), params)

    def _append_entries(
        self,
        x: Tensor,
        layer: int,
        numbers: tuple[int, int],
        step: Step,
        params: Params,
        kv: KVCache,
    ) -> None:
        assert self.compressor is not None and self.rows is not None
        places = [self.rows] if self.indexer is None else [self.rows, self.indexer.rows]
        targets = (numbers[1], numbers[0])
        entries = self.compressor(x, layer, step, params, kv)
        for rows, target, by_run in zip(places, targets, entries, strict=False):
            turned = []
            for run, own in zip(step.segments, by_run, strict=True):
                count = run.start // rows.positions
                starts = torch.arange(count, count + len(own), device=own.device)
                angles = self.rotary.at(starts * rows.positions)
                turned.append(_turned(own[:, None], *angles)[:, 0])
            rows.append(target, step, turned, kv, x)

    def _attend(
        self,
        out: Tensor,
        query: Tensor,
        layer: int,
        entries: int,
        run: Segment,
        selection: tuple[Segment, Tensor] | None,
        sinks: Tensor,
        kv: KVCache,
    ) -> None:
        """Attention of the tokens of `run`, into their rows of `out`.

        Every token attends by itself, to rows that are gathered for it, entries first, so that its
        result does not depend on how many others there are.
        """
        skipped = run.length if selection is None else run.length - selection[0].length
        begin = max(0, run.start - self.window + 1)
        span = torch.arange(begin, run.context, device=out.device)
        rows = kv.gather(layer, run, span)[0][:, 0].to(out.dtype)
        known = rows[:0]
        if self.rows is not None and skipped:
            count = (run.start + skipped) // self.rows.positions
            wanted = torch.arange(count, device=out.device)
            known = self.rows.read(entries, run, wanted, kv).to(out.dtype)
        together = torch.cat((known, rows)) if len(known) else rows
        for first, last in self._pieces(run, skipped):
            own = self._window_of(run.start + first, run.start + last, out.device) - begin
            given, before = together, len(known)
            if selection is not None and first >= skipped:
                assert self.rows is not None
                chosen = selection[1][first - skipped : last - skipped].to(out.device)
                union, mine = chosen.unique(return_inverse=True)
                low = int(own[0, 0])
                found = self.rows.read(entries, run, union, kv).to(out.dtype)
                given = torch.cat((found, rows[low : run.start + last - begin]))
                own, before = own - low, len(union)
            else:
                count = 0 if self.rows is None else (run.start + first + 1) // self.rows.positions
                mine = torch.arange(count, device=out.device).expand(last - first, -1)
            part = slice(run.offset + first, run.offset + last)
            out[part] = ops.selected_attention(
                query[part],
                given[:, None],
                torch.cat((mine, before + own), dim=1),
                self.head_dim,
                scale=self.head_dim**-0.5,
                sinks=sinks,
            )

    def _pieces(self, run: Segment, skipped: int) -> Iterator[tuple[int, int]]:
        """Tokens of a run, (first, past last), that see as many entries and positions each.

        skipped   of its tokens, those that no indexer selects for
        """
        first = 0
        while first < run.length:
            position, last = run.start + first, first + _QUERIES_AT_ONCE
            if position < self.window - 1:
                last = first + 1
            if first < skipped and self.compressor is not None:
                size = self.compressor.positions
                last = min(last, first + size - (position + 1) % size)
            if first < skipped:
                last = min(last, skipped)
            last = min(last, run.length)
            yield first, last
            first = last

    def _window_of(self, start: int, end: int, device: torch.device) -> Tensor:
        """Positions that those from `start` to `end` see of the window: int64 [tokens, seen]."""
        seen = min(self.window, start + 1)
        last = torch.arange(start, end, device=device)[:, None]
        return last - seen + 1 + torch.arange(seen, device=device)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [tokens, heads, dim], whose last numbers turn; those of a kind then lie together."""
    still, turning = heads.split((heads.shape[2] - cos.shape[1], cos.shape[1]), dim=2)
    return torch.cat((still, ops.rope(turning, cos, sin, interleaved=True)), dim=2)


def _turned_back(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The opposite of `_turned`, with numbers in their old order."""
    still, turning = heads.split((heads.shape[2] - cos.shape[1], cos.shape[1]), dim=2)
    turning = ops.rope(turning.contiguous(), cos, -sin)
    back = turning.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
    return torch.cat((still, back), dim=2)
