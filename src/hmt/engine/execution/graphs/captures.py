"""What a graph runner keeps of a capture, and of a step that it has begun."""

from dataclasses import dataclass, field

import torch

from hmt.contracts.step import Segment, Step
from hmt.kernels import ops
from hmt.memory.device import CapturedStep, Event

# Tokens, sequences, positions up to which runs may come, and what the model's angles depend on.
GraphKey = tuple[int, int, int, tuple[int, ...]]


@dataclass(slots=True)
class Result:
    """What a replay leaves in host memory, from `arrived` on.

    left         logits, f32 [tokens, vocab], and
    logit_stats  f64 [3, tokens], what `captures.surveys` says of each token's; where the head is
                 the CPU's: hidden states [tokens, hidden_size], and None
    """

    left: torch.Tensor
    logit_stats: torch.Tensor | None
    arrived: Event


@dataclass(slots=True)
class CapturedGraph:
    """A capture for so many runs of one token, or tokens of steps that verify draft tokens.

    context      no run may be longer
    sequences    that the tokens are of, where some are draft tokens; else 0
    hidden       what the step begins with; None where the capture begins with its tokens
    step         of the tensors that kernels read; its runs are those of the step that is computed
                 now
    runs         where tokens lie, in tensors that stay where they are; None where kernels read
                 `step`
    state_runs   the same of recurrent state
    logit_stats  of the logits that a replay leaves; None where it leaves hidden states
    has_host_part   whether the CPU computes between its device graphs
    recorded     its segments, once it is captured
    rooms        up to which position each of `runs` knows its pages
    results      two, used alternately: of what it leaves on the device and in host memory, and of
                 surveys
    """

    context: int
    hidden: torch.Tensor | None
    step: Step
    runs: ops.AttentionMetadata | None
    has_host_part: bool
    sequences: int = 0
    state_runs: ops.StateRuns | None = None
    recorded: CapturedStep | None = None
    logit_stats: torch.Tensor | None = None
    rooms: list[int] = field(default_factory=list)
    results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=list
    )


@dataclass(slots=True)
class AsyncNextStep:
    """A step that has begun already."""

    captured: CapturedGraph
    runs: tuple[Segment, ...]
    tokens: list[int]
    result: Result


@dataclass(slots=True)
class AsyncStepCounters:
    """Steps that were begun early, and those of them that came."""

    begun: int = 0
    right: int = 0
