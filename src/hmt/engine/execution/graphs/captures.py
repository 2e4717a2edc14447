"""What a graph runner keeps of a capture, and of a step that it has begun."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from hmt.contracts.step import Segment, Step
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.kernels import ops
from hmt.memory.device import CapturedStep, Event, host_buffer


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a capture is for.

    context   positions up to which runs may come
    angles    what the model's angles depend on
    inputs    numbers of the hidden state that comes in beside each token; 0: none does
    shown     behind so many layers hidden states are shown, or if () behind the final norm; None:
              none are
    axes      whether rotary positions have three axes
    """

    tokens: int
    sequences: int
    context: int
    angles: tuple[int, ...]
    inputs: int = 0
    shown: tuple[int, ...] | None = None
    axes: bool = False

    @property
    def verified(self) -> int:
        """Sequences that the tokens are of, where some are draft tokens; else 0."""
        return self.sequences if self.tokens > self.sequences else 0


@dataclass(slots=True)
class Result:
    """What a replay leaves in host memory, from `arrived` on.

    left         logits, f32 [tokens, vocab], and
    logit_stats  f64 [3, tokens], what `captures.surveys` says of each token's; where the head is
                 the CPU's: hidden states [tokens, hidden_size], and None
    shown        hidden states f32 [tokens, width] that were asked for; None: none were, or `left`
                 tells
    last         [tokens, ...] behind the last layer; None: they are not observed, or `left` tells
    """

    left: torch.Tensor
    logit_stats: torch.Tensor | None
    shown: torch.Tensor | None
    last: torch.Tensor | None
    arrived: Event

    def show(
        self, viewer: PromptOutputSource, normed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Let `viewer` have the hidden states that it asked for: `normed`, where it is `left`."""
        if self.shown is None:
            viewer.hidden(0, normed(self.left))
        elif viewer.layers:
            parts = self.shown.chunk(len(viewer.layers), dim=1)
            for layer, part in zip(viewer.layers, parts, strict=True):
                viewer.layer_hidden(layer, part)
        else:
            viewer.hidden(0, self.shown)


@dataclass(slots=True)
class ResultBuffers:
    """Memory for what a replay leaves: `kept` of that on the device, all else in host memory."""

    kept: torch.Tensor
    left: torch.Tensor
    logit_stats: torch.Tensor | None
    shown: torch.Tensor | None
    last: torch.Tensor | None


@dataclass(slots=True)
class CapturedGraph:
    """A capture for so many runs of one token, or tokens of steps that verify draft tokens.

    key          what it is for
    hidden       what the step begins with; None where the capture begins with its tokens
    step         of the tensors that kernels read; its runs are those of the step that is computed
                 now
    runs         where tokens lie, in tensors that stay where they are; None where kernels read
                 `step`
    state_runs   the same of recurrent state
    logit_stats  of the logits that a replay leaves; None where it leaves hidden states
    has_host_part   whether the CPU computes between its device graphs
    recorded     its segments, once it is captured
    shown        f32 [tokens, width] on the device: hidden states that are asked for; None: see
                 Result
    last         [tokens, width] on the device: hidden states behind the last layer, where these
                 are observed and are not what a replay leaves
    rooms        up to which position each of `runs` knows its pages
    results      two, used alternately: of what it leaves
    """

    key: GraphKey
    hidden: torch.Tensor | None
    step: Step
    runs: ops.AttentionMetadata | None
    has_host_part: bool
    state_runs: ops.StateRuns | None = None
    recorded: CapturedStep | None = None
    logit_stats: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    rooms: list[int] = field(default_factory=list)
    last: torch.Tensor | None = None
    results: list[ResultBuffers] = field(default_factory=list)

    @property
    def sequences(self) -> int:
        """See GraphKey.verified."""
        return self.key.verified

    def next_buffers(self, left: torch.Tensor) -> ResultBuffers:
        """For what a replay leaves, which the next replay does not take: copies are begun.

        `left` itself is for the caller to copy.
        """
        if len(self.results) < 2:
            with torch.inference_mode(False):  # a copy may end when all computing has
                kept = torch.empty(left.shape, dtype=left.dtype, device=left.device)
                beside = (_beside(one) for one in (self.logit_stats, self.shown, self.last))
                host = host_buffer(left.shape, left.dtype, left.device)
                self.results.append(ResultBuffers(kept, host, *beside))
        else:
            self.results.append(self.results.pop(0))
        buffers = self.results[-1]
        for there, here in (
            (self.logit_stats, buffers.logit_stats),
            (self.shown, buffers.shown),
            (self.last, buffers.last),
        ):
            if there is not None and here is not None:
                here.copy_(there, non_blocking=True)
        return buffers

    def keep_last(self, states: torch.Tensor) -> None:
        """Copy hidden states behind the last layer, for an observer."""
        if self.last is None:
            with torch.inference_mode(False):
                self.last = torch.empty(states.shape, dtype=states.dtype, device=states.device)
        self.last.copy_(states)

    def show(self, states: torch.Tensor, layer: int | None = None) -> None:
        """Copy hidden states [tokens, width] that are asked for.

        layer   as many layers come before them; None: the final norm does, and all layers
        """
        states, layers = states.flatten(1), self.key.shown or (layer,)
        if self.shown is None:
            shape = len(states), len(layers) * states.shape[1]
            with torch.inference_mode(False):
                self.shown = torch.empty(shape, device=states.device)
        first = layers.index(layer) * states.shape[1]
        self.shown[:, first : first + states.shape[1]].copy_(states)


@dataclass(slots=True)
class AsyncNextStep:
    """A step that has begun already.

    axes   int64 [3, tokens] in host memory: its rotary positions; None: those of its places
    """

    captured: CapturedGraph
    runs: tuple[Segment, ...]
    tokens: list[int]
    axes: torch.Tensor | None
    result: Result

    def is_of(self, step: Step, shown: tuple[int, ...] | None) -> bool:
        """Whether it computes what `step` wants, recurrent state aside."""
        if self.axes is None or step.axes is None:
            alike = self.axes is step.axes
        else:
            alike = torch.equal(self.axes, step.axes)
        return (
            alike
            and step.segments == self.runs
            and self.captured.key.shown == shown
            and len(step.logit_rows) == len(self.tokens)
            and step.token_ids.tolist() == self.tokens
        )


def room_of(run: Segment) -> int:
    """Positions that it has pages for: a sequence that grows may have fewer than it may need."""
    return min(run.reserved, run.reserved_tokens or run.reserved)


def next_runs(runs: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The runs of the step that follows, if all go on."""
    return tuple(replace(run, start=run.start + 1) for run in runs)


def token_runs(runs: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Each token of `runs` as a run."""
    return tuple(
        replace(run, start=run.start + at, offset=run.offset + at, length=1, drafts=0)
        for run in runs
        for at in range(run.length)
    )


def _beside(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Pinned host memory for a copy of a device's tensor."""
    return None if tensor is None else host_buffer(tensor.shape, tensor.dtype, tensor.device)
