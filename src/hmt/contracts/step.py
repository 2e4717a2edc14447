"""A step: one forward pass over a batch of token runs.

The scheduler emits it as `SchedulerOutput`, plain numbers that another process or machine can be
sent.  A `Step` has the same as the tensors that a model computes from.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class ImageTokens(NamedTuple):
    """Tokens of a prompt that stand for rows of one image.

    key     of a `PreparedImage`
    first   row of its features that the first of them stands for
    offset  of that token, in the prompt or in the segment that this is part of
    length  number of tokens, one after the other
    """

    key: str
    first: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: a prefill chunk, or one decode token.

    sequence         handle of the sequence in the KV cache
    start            position of the first token
    offset           index of the first token in the step's flat arrays
    length           number of tokens
    reserved         positions that the sequence may reach; 0 where that is not known
    reserved_tokens  positions that the KV cache has pages for by now; 0: all that are
                     reserved.  Runs that differ in nothing else are equal.
    whole            positions that are rotated as one prompt: rotary frequencies that depend on a
                     length go by this many, and behind them by the positions up to each token.  0:
                     `context`.
    drafts           how many of the last tokens are drafts, which may be taken back
    preceding        the tokens right before the run, oldest first: as many as there are, up to the
                     model's `token_window`
    blocks           (first, behind the last) positions that see each other, whatever comes later
                     of them; the run holds all of each that no earlier one did
    adapter          number of the low-rank adapter that its tokens are computed with; 0: none
    """

    sequence: int
    start: int
    offset: int
    length: int
    reserved: int = 0
    reserved_tokens: int = field(default=0, compare=False)
    whole: int = 0
    drafts: int = 0
    preceding: tuple[int, ...] = field(default=(), compare=False)
    blocks: tuple[tuple[int, int], ...] = ()
    adapter: int = 0

    @property
    def context(self) -> int:
        """Positions that exist once this run has been appended."""
        return self.start + self.length

    @property
    def rotated(self) -> int:
        """The fewest positions that rotary frequencies of its tokens go by."""
        return self.whole or self.context

    @property
    def tokens(self) -> slice:
        """This run's part of the step's flat arrays."""
        return slice(self.offset, self.offset + self.length)


class SegmentRequest(NamedTuple):
    """One sequence's share of a step, as plain numbers.

    sequence             handle of the sequence in the KV cache
    start                position of the first token
    num_logit_rows       how many of the last tokens need logits: 0, 1, or all of them
    reserved, reserved_tokens, whole, drafts, preceding   see Segment
    num_prompt_logprobs  how many of the first tokens have logits that are looked at and not kept
    num_pooled           how many of the last tokens have hidden states that are
    request              number of the request that the tokens belong to; 0: of none
    images               tokens of the segment that stand for images
    axes                 rotary positions of its tokens, of three axes; (): one, by their places
    blocks               see Segment
    raised               whether its tokens are computed in higher precision; such segments are the
                         last of a step
    adapter              see Segment

    Where all tokens are drafts, even the first, which another segment of the request has as well,
    it is a branch: another draft, over a fork of the sequence.
    """

    sequence: int
    start: int
    tokens: list[int]
    num_logit_rows: int
    reserved: int = 0
    reserved_tokens: int = 0
    num_prompt_logprobs: int = 0
    num_pooled: int = 0
    whole: int = 0
    request: int = 0
    drafts: int = 0
    preceding: tuple[int, ...] = ()
    images: tuple[ImageTokens, ...] = ()
    axes: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    raised: bool = False
    adapter: int = 0

    @classmethod
    def from_list(cls, fields: list[Any]) -> "SegmentRequest":
        """From its fields in order, as JSON has them."""
        request = cls(*fields)
        return request._replace(
            preceding=tuple(request.preceding),
            images=tuple(ImageTokens(*image) for image in request.images),
            axes=tuple(map(tuple, request.axes)),
            blocks=tuple((first, end) for first, end in request.blocks),
        )

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def is_branch(self) -> bool:
        """Whether it is another draft of a request that has a segment already."""
        return self.drafts == len(self.tokens)

    @property
    def context(self) -> int:
        """Positions that exist once the tokens have been appended."""
        return self.start + len(self.tokens)


class KVOperation(NamedTuple):
    """A change of what sequences hold in a KV cache: a method of it, and its arguments.

    name       "open", "fork", "grow", "shrink", "rewind", "rollback", "park", "resume" or "close"
    arguments  of that method: handles, then numbers of positions
    opened     the handle that an "open" or a "fork" returned; 0 of all others
    """

    name: str
    arguments: tuple[int, ...]
    opened: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What a step computes, without tensors and without the requests themselves.

    segments       in the order of the step's flat arrays; at most one per sequence
    prompt_tokens  tokens of the step that belong to prompts
    kv_operations  what sequences were given and lost in the KV cache since the last step, in order.
                   With a prefix cache those that it makes are missing.
    logit_rows     indices of the tokens whose logits are wanted; None: the segments tell
    """

    segments: tuple[SegmentRequest, ...]
    prompt_tokens: int = 0
    kv_operations: tuple[KVOperation, ...] = ()
    logit_rows: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def shows_prompts(self) -> bool:
        """Whether any rows are scored or pooled."""
        return any(s.num_prompt_logprobs or s.num_pooled for s in self.segments)

    @property
    def sampled(self) -> list[int]:
        """The request whose next token a row of the step's logits chooses, for each row."""
        return [run.request for run in self.segments for _ in range(run.num_logit_rows)]

    @property
    def num_sequences(self) -> int:
        """Segments that are no branches."""
        return sum(not segment.is_branch for segment in self.segments)

    @property
    def num_drafts(self) -> int:
        """Guesses of all segments."""
        return sum(segment.drafts for segment in self.segments)

    @property
    def scored(self) -> list[tuple[int, int]]:
        """(request, position) of each scored row, whose logits tell of the token behind it."""
        return [
            (segment.request, segment.start + number)
            for segment in self.segments
            for number in range(segment.num_prompt_logprobs)
        ]

    @property
    def pooled(self) -> list[tuple[int, int]]:
        """(request, position) of each pooled row."""
        return [
            (segment.request, position)
            for segment in self.segments
            for position in range(segment.context - segment.num_pooled, segment.context)
        ]

    def to_json(self) -> str:
        """As a JSON object, which `from_json` reads."""
        fields = {"segments": self.segments, "prompt_tokens": self.prompt_tokens}
        return json.dumps(
            fields | {"kv_operations": self.kv_operations, "logit_rows": self.logit_rows}
        )

    @staticmethod
    def from_json(text: str) -> "SchedulerOutput":
        """What `to_json` was called on."""
        fields: dict[str, Any] = json.loads(text)
        rows = fields["logit_rows"]
        return SchedulerOutput(
            tuple(map(SegmentRequest.from_list, fields["segments"])),
            fields["prompt_tokens"],
            tuple(
                KVOperation(name, tuple(arguments), opened)
                for name, arguments, opened in fields["kv_operations"]
            ),
            None if rows is None else tuple(rows),
        )


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One forward pass.  Runs of unequal length lie one after the other.

    token_ids    int64 [tokens]
    positions    int64 [tokens]
    segments     in the order of the flat arrays; at most one run per sequence
    logit_rows   int64 [rows]: indices of the tokens whose logits are wanted
    scored_rows  int64 [scored]: of those whose logits are only looked at, a few at a time
    pooled_rows  int64 [pooled]: of those whose last hidden states are
    inputs       f32 [tokens, hidden_size], of multi-token prediction alone: the hidden state of the
                 token before each
    axes         int64 [3, tokens]: rotary positions of models that have three axes; None: those of
                 the tokens' places, on each of them
    image_rows   int64 [rows]: indices of tokens that stand for images; None: none does
    image_features   f [rows, hidden_size], in the place of their embeddings
    layer_features   each of that shape, added to their hidden states behind the first layers
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
    scored_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    pooled_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    inputs: torch.Tensor | None = None
    axes: torch.Tensor | None = None
    image_rows: torch.Tensor | None = None
    image_features: torch.Tensor | None = None
    layer_features: tuple[torch.Tensor, ...] = ()

    @property
    def has_blocks(self) -> bool:
        """Whether any tokens see later ones."""
        return any(run.blocks for run in self.segments)

    @property
    def has_adapters(self) -> bool:
        """Whether any tokens are computed with an adapter."""
        return any(run.adapter for run in self.segments)

    @property
    def has_prompt_outputs(self) -> bool:
        """Whether any rows are only looked at."""
        return bool(len(self.scored_rows) or len(self.pooled_rows))

    @staticmethod
    def build(
        parts: Iterable[SegmentRequest | tuple[int, int, list[int], int]],
        logit_rows: Sequence[int] | None = None,
        inputs: torch.Tensor | None = None,
    ) -> "Step":
        """A step from parts, in their order; `logit_rows` in place of what they tell of these."""
        runs: list[Segment] = []
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        scored: list[int] = []
        pooled: list[int] = []
        segments = [SegmentRequest(*part) for part in parts]
        for part in segments:
            offset, length = len(ids), len(part.tokens)
            end = offset + length
            limits = part.reserved, part.reserved_tokens, part.whole, part.drafts
            seen = part.preceding, part.blocks, part.adapter
            runs.append(Segment(part.sequence, part.start, offset, length, *limits, *seen))
            ids += part.tokens
            positions += range(part.start, part.start + length)
            rows += range(end - part.num_logit_rows, end)
            scored += range(offset, offset + part.num_prompt_logprobs)
            pooled += range(end - part.num_pooled, end)
        rows = rows if logit_rows is None else list(logit_rows)
        axes = _axes(segments) if any(part.axes for part in segments) else None
        token_ids, places, of_logits, of_scores, of_pools = (
            torch.tensor(numbers, dtype=torch.int64)
            for numbers in (ids, positions, rows, scored, pooled)
        )
        return Step(token_ids, places, tuple(runs), of_logits, of_scores, of_pools, inputs, axes)


def _axes(parts: Sequence[SegmentRequest]) -> torch.Tensor:
    """Rotary positions of all tokens on three axes: int64 [3, tokens]."""
    places = [
        torch.tensor(part.axes, dtype=torch.int64)
        if part.axes
        else torch.arange(part.start, part.context).expand(3, -1)
        for part in parts
    ]
    return torch.cat(places, dim=1)
