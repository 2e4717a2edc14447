"""Hidden states of a step's tokens, for proposers that compute from them."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine.outputs.prompt_outputs import PromptOutputSource


def with_hidden(output: SchedulerOutput) -> SchedulerOutput:
    """The step with all its rows pooled.  Only for steps that show nothing of prompts."""
    segments = (segment._replace(num_pooled=segment.length) for segment in output.segments)
    return replace(output, segments=tuple(segments))


class HiddenStates(PromptOutputSource):
    """Keeps the rows of one step."""

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        """`layers` as in PromptOutputSource."""
        self.layers = layers
        self._joined: list[Tensor] = []  # by layer
        self._parts: list[Tensor] = []

    def begin(self) -> None:
        """A step begins, which may show nothing."""
        self._parts, self._joined = [], []

    @override
    def logits(self, first: int, logits: Tensor) -> None:
        """None is asked for."""

    @override
    def hidden(self, first: int, hidden: Tensor) -> None:
        self._parts.append(hidden.clone())

    @override
    def layer_hidden(self, layer: int, hidden: Tensor) -> None:
        self._joined.append(hidden.float())
        if len(self._joined) == len(self.layers):
            self._parts.append(torch.cat(self._joined, dim=1))
            self._joined = []  # segments in higher precision come in a second pass

    def by_segment(self, output: SchedulerOutput) -> Iterator[tuple[SegmentRequest, Tensor]]:
        """Each segment with its rows f32 [tokens, ...]; nothing where the step showed none.

        Those of several layers are joined: [tokens, layers * hidden_size].
        """
        if self._parts:
            rows = torch.cat(self._parts)
            for number, segment in enumerate(output.segments):
                first = sum(other.length for other in output.segments[:number])
                yield segment, rows[first : first + segment.length]
