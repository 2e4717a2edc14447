"""What stands for several positions: mixtures of what their tokens give, by weights of each number.

An entry is known when the last of its positions is.  Until then a mixture that has begun is
recurrent state, which goes on token by token, so that no bit depends on how a prompt is divided
into steps.  Entries then lie in the KV cache, in rows of the positions that they stand for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer, LayerState, StateTensor
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.linear import Params
from hmt.layers.norm import RMSNorm

_MIXTURE = 3  # rows of numbers: the largest logit, the sum of weights, and that of weighted numbers


@dataclass(frozen=True, slots=True)
class GroupRows:
    """How entries lie in a KV cache, which has a row for each position.

    An entry is divided among the rows of the last positions that it stands for, as many as lie in
    one page: a sequence alone owns the page of the position that makes an entry known, and with all
    rows in that page, sequences that begin alike share pages as always.

    positions   that an entry stands for: a divisor of PAGE_TOKENS, or a multiple of it
    dim         numbers of an entry, a multiple of `rows`
    """

    positions: int
    dim: int

    @property
    def rows(self) -> int:
        """Rows that an entry takes."""
        return min(self.positions, PAGE_TOKENS)

    def kv(self, kind: KVKind, query_heads: int = 0) -> KVLayer:
        """What one layer keeps per token."""
        width = self.dim // self.rows
        return KVLayer(kind, 1, width, width, query_heads=query_heads, grouped=self.rows)

    def append(
        self, layer: int, step: Step, entries: Sequence[Tensor], kv: KVCache, like: Tensor
    ) -> None:
        """Write the entries that each run of the step has made known, [entries, dim] for each run.

        Rows of positions whose entry is not known yet hold zeros.  `like` has their dtype.
        """
        written = [
            self._rows_of(run, own.to(like.dtype))
            for run, own in zip(step.segments, entries, strict=True)
        ]
        kv.append(layer, step, torch.cat(written)[:, None], None)

    def _rows_of(self, run: Segment, entries: Tensor) -> Tensor:
        """Rows of all positions from the beginning of the group that the run begins in."""
        first = run.start // self.rows * self.rows
        groups = -(-(run.context - first) // self.rows)
        rows = entries.new_zeros(groups, self.rows, self.dim // self.rows)
        numbers = torch.arange(len(entries), device=rows.device) + run.start // self.positions + 1
        rows[(numbers * self.positions - first) // self.rows - 1] = entries.view(
            len(entries), *rows.shape[1:]
        )
        return rows.flatten(0, 1)[: run.context - first]

    def read_all(self, layer: int, run: Segment, kv: KVCache, device: torch.device) -> Tensor:
        """All entries that are known behind `run`: [entries, dim]."""
        count = run.context // self.positions
        if count and self.rows == self.positions:
            return kv.read(layer, run)[0][: count * self.rows].reshape(count, self.dim)
        return self.read(layer, run, torch.arange(count, device=device), kv)

    def read(self, layer: int, run: Segment, numbers: Tensor, kv: KVCache) -> Tensor:
        """Entries `numbers`, int64 [n] and ascending: [n, dim]."""
        inside = torch.arange(-self.rows, 0, device=numbers.device)
        positions = (numbers[:, None] + 1) * self.positions + inside
        return kv.gather(layer, run, positions.flatten())[0].reshape(len(numbers), self.dim)


@dataclass(frozen=True, slots=True)
class EntryPart:
    """Some numbers of an entry, which matrices, biases and a norm of their own make.

    name   that its parameters' local names begin with
    at     and their names in checkpoints, behind that of the layer's attention
    """

    name: str
    at: str
    norm: RMSNorm

    @property
    def dim(self) -> int:
        """How many numbers."""
        return self.norm.width


@dataclass(frozen=True, slots=True)
class GroupMeans:
    """Means of what the tokens of each so many positions give, by weights of each number.

    The weights are a softmax of the tokens' logits, for each number by itself.  A mean is known
    with the last of its positions; one that has begun is recurrent state.

    dim      numbers of a mean
    series   means that a token gives to: to its own, and to those behind it
    """

    positions: int
    dim: int
    series: int = 1

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence: mixtures that have begun."""
        inputs = 2 * self.series * self.dim + 1
        return (StateTensor("mixtures", (self.series, _MIXTURE, self.dim), inputs),)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token, in f32: what it gives, arranged by place; mixtures, means."""
        return 2 * (6 * self.series + 3 * _MIXTURE) * self.dim

    def __call__(
        self, numbers: Tensor, logits: Tensor, layer: int, step: Step, kv: KVCache
    ) -> list[Tensor]:
        """By run, the means that the run makes known: f32 [means, dim].

        numbers and logits, f32 [tokens, series, dim].  Advances the recurrent state of `layer`.
        """
        state = kv.state(layer, step)
        mixtures = state.tensors["mixtures"]

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            return self._mixed(inputs, runs, mixtures)

        places = (step.positions % self.positions)[:, None].float()
        means = state.advance((numbers, logits, places), update)
        firsts = (self.positions - 1 - run.start % self.positions for run in step.segments)
        return [
            means[run.tokens][first :: self.positions]
            for run, first in zip(step.segments, firsts, strict=True)
        ]

    def _mixed(self, inputs: Sequence[Tensor], runs: Sequence[StateRun], state: Tensor) -> Tensor:
        """What tokens make known, f32 [tokens, dim]; of tokens that make nothing known, anything.

        inputs   numbers and logits, each [tokens, series, dim], and places [tokens, 1]
        state    f32 [slots, series, 3, dim], which changes
        """
        numbers, logits, places = inputs
        out = numbers.new_empty(len(numbers), self.dim)
        for run in runs:
            begun = torch.zeros_like(state[run.slot]) if run.begins else state[run.slot]
            place = int(places[run.offset, 0])
            means, after = self._run(numbers[run.tokens], logits[run.tokens], place, begun)
            first = self.positions - 1 - place
            out[run.tokens][first :: self.positions] = means
            if run.drafts and run.stays:  # the means are the same, the state is that before drafts
                stays = slice(run.offset, run.offset + run.stays)
                _, after = self._run(numbers[stays], logits[stays], place, begun)
            if run.stays:
                state[run.slot] = after
        return out

    def _run(
        self, numbers: Tensor, logits: Tensor, place: int, begun: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of one run's tokens, the first of which stands at `place`: entries, and the new state."""
        size, end = self.positions, place + len(numbers)
        count = -(-end // size)
        padded = [
            part.new_zeros(count * size, *part.shape[1:]).index_copy_(
                0, torch.arange(place, end, device=part.device), part
            )
            for part in (numbers, logits)
        ]
        numbers, logits = (part.unflatten(0, (count, size)) for part in padded)
        mixtures = begun.new_zeros(self.series, count + 1, _MIXTURE, self.dim)
        # What tokens give to the entry behind theirs comes first: that begins with it.
        for series in reversed(range(self.series)):
            mixtures[series, 0] = begun[series]
            if series + 1 < self.series:
                mixtures[series, 1:] = mixtures[series + 1, :-1]
            for at in range(min(size, end)) if count > 1 else range(place, end):
                first, last = int(at < place), count - int((count - 1) * size + at >= end)
                some = mixtures[series, first:last]
                given = self.series - 1 - series  # what is for the entry behind comes first
                _add(some, numbers[first:last, at, given], logits[first:last, at, given])
        whole = end // size
        means = mixtures[0, :whole, 2] / mixtures[0, :whole, 1]
        return means, mixtures[:, whole]


@dataclass(frozen=True, slots=True)
class Compressor:
    """Makes an entry of each so many positions (DeepSeek-V4, sections 2.3.1 and 2.3.2).

    Each token gives numbers, and as many logits, to which those of its place among the positions
    are added.  An entry is the mean of its tokens' numbers, weighed by a softmax of their logits
    for each number by itself; normed.

    positions     of an entry
    overlapping   each token gives all this twice: to its own entry, and to the one behind it
    """

    hidden_size: int
    positions: int
    overlapping: bool
    parts: tuple[EntryPart, ...]

    @property
    def dim(self) -> int:
        """Numbers of an entry, of all parts."""
        return sum(part.dim for part in self.parts)

    @property
    def series(self) -> int:
        """Entries that a token gives to."""
        return 1 + self.overlapping

    @property
    def means(self) -> GroupMeans:
        """What entries are before their norms."""
        return GroupMeans(self.positions, self.dim, self.series)

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        return self.means.state

    @property
    def activation_width(self) -> int:
        """Numbers alive per token."""
        return self.means.activation_width

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + wkv, wgate, ape and norm of each part in the checkpoint."""
        found: list[ParamSpec] = []
        for part in self.parts:
            width, own, name = self.series * part.dim, at + part.at, part.name
            shape = (width, self.hidden_size)
            # VECTOR: rounding them changes all that stands for positions; they are published in 16
            # bits where the matrices beside them have 8.
            found += (
                ParamSpec(f"{name}kv", shape, (f"{own}wkv.weight",), Role.VECTOR),
                ParamSpec(f"{name}gate", shape, (f"{own}wgate.weight",), Role.VECTOR),
                ParamSpec(f"{name}bias", (self.positions, width), (f"{own}ape",), Role.VECTOR),
                part.norm.param(f"{name}norm", f"{own}norm.weight"),
            )
        return tuple(found)

    def __call__(
        self, x: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> list[list[Tensor]]:
        """By part, and in it by run, the entries that the run makes known: f32 [entries, dim].

        x [tokens, hidden_size].  Advances the recurrent state of `layer`.
        """
        places = step.positions % self.positions
        numbers, logits, wide = [], [], x.float()
        for part in self.parts:
            given = ops.linear(wide, params[f"{part.name}kv"])
            wanted = ops.linear(wide, params[f"{part.name}gate"])
            wanted = wanted + params[f"{part.name}bias"].data.float()[places]
            shape = (self.series, part.dim)
            numbers.append(given.unflatten(1, shape))
            logits.append(wanted.unflatten(1, shape))
        means = self.means(torch.cat(numbers, dim=2), torch.cat(logits, dim=2), layer, step, kv)
        found: list[list[Tensor]] = [[] for _ in self.parts]
        for known in means:
            for own, part, some in zip(
                found, self.parts, known.split([p.dim for p in self.parts], dim=1), strict=True
            ):
                own.append(part.norm(some.contiguous(), params[f"{part.name}norm"]))
        return found


def _add(mixtures: Tensor, numbers: Tensor, logits: Tensor) -> None:
    """Add a token to each mixture [n, 3, dim], in place; numbers and logits [n, dim].

    A softmax that goes on: what was added counts less where a larger logit comes.
    """
    largest, total, weighted = mixtures.unbind(1)
    begun = total > 0
    top = torch.where(begun, torch.maximum(largest, logits), logits)
    kept = torch.where(begun, torch.exp(largest - top), 0.0)
    added = torch.exp(logits - top)
    weighted.copy_(weighted * kept + added * numbers)
    total.copy_(total * kept + added)
    largest.copy_(top)
