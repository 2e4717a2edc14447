"""A step: one forward pass over a batch of token runs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


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
    """

    sequence: int
    start: int
    offset: int
    length: int
    reserved: int = 0
    reserved_tokens: int = field(default=0, compare=False)
    whole: int = 0

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
    """One sequence's share of a step that is to be built.

    num_logit_rows       how many of the last tokens need logits: 0, 1, or all of them
    num_prompt_logprobs  how many of the first tokens have logits that are looked at and not kept
    num_pooled           how many of the last tokens have hidden states that are
    whole                see Run
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


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One forward pass.  Runs of unequal length lie one after the other.

    token_ids    int64 [tokens]
    positions    int64 [tokens]
    segments     in the order of the flat arrays; at most one run per sequence
    logit_rows   int64 [rows]: indices of the tokens whose logits are wanted
    scored_rows  int64 [scored]: of those whose logits are only looked at, a few at a time
    pooled_rows  int64 [pooled]: of those whose last hidden states are
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor
    scored_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    pooled_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def has_prompt_outputs(self) -> bool:
        """Whether any rows are only looked at."""
        return bool(len(self.scored_rows) or len(self.pooled_rows))

    @staticmethod
    def build(parts: Iterable[SegmentRequest | tuple[int, int, list[int], int]]) -> "Step":
        """A step from parts, in their order."""
        runs: list[Segment] = []
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        scored: list[int] = []
        pooled: list[int] = []
        for part in (SegmentRequest(*part) for part in parts):
            offset, length = len(ids), len(part.tokens)
            end = offset + length
            limits = part.reserved, part.reserved_tokens, part.whole
            runs.append(Segment(part.sequence, part.start, offset, length, *limits))
            ids += part.tokens
            positions += range(part.start, part.start + length)
            rows += range(end - part.num_logit_rows, end)
            scored += range(offset, offset + part.num_prompt_logprobs)
            pooled += range(end - part.num_pooled, end)
        flat = [
            torch.tensor(of, dtype=torch.int64) for of in (ids, positions, rows, scored, pooled)
        ]
        return Step(flat[0], flat[1], tuple(runs), *flat[2:])
