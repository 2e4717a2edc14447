"""Hidden states of a step's tokens, for proposers that compute from them."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hmt.contracts.step import SchedulerOutput, SegmentRequest


def with_hidden(output: SchedulerOutput) -> SchedulerOutput:
    """The step with all its rows pooled.  Only for steps that show nothing of prompts."""
    segments = (segment._replace(num_pooled=segment.length) for segment in output.segments)
    return replace(output, segments=tuple(segments))


class HiddenStates:
    """Implements PromptOutputSource: keeps the rows of one step."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def begin(self) -> None:
        """A step begins, which may show nothing."""
        self._parts = []

    def logits(self, first: int, logits: Tensor) -> None:
        """None is asked for."""

    def hidden(self, first: int, hidden: Tensor) -> None:
        """See PromptOutputSource."""
        self._parts.append(hidden.clone())

    def by_segment(self, output: SchedulerOutput) -> Iterator[tuple[SegmentRequest, Tensor]]:
        """Each segment with f32 [tokens, hidden_size]; nothing where the step showed none."""
        if self._parts:
            rows = torch.cat(self._parts)
            for number, segment in enumerate(output.segments):
                first = sum(other.length for other in output.segments[:number])
                yield segment, rows[first : first + segment.length]
