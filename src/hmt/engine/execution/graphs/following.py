"""Captured steps of a rank that does not compute logits, and does as the first rank does."""

import torch
from typing_extensions import override

from hmt.base.errors import RankError
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.captures import CapturedGraph
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.kernels import graph_ops
from hmt.memory.device import Event


class FollowingGraphRunner(GraphRunner):
    """A GraphRunner whose model has no head: of a step it computes layers, for their sums alone.

    It begins the next step when the first rank does, which knows the tokens.
    """

    _last: tuple[CapturedGraph, Event] | None = None  # what it put on the queue

    @override
    def __call__(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor | None:
        """No logits [0, vocab]; None for steps that are not captured."""
        last, self._last = self._last, None
        self.has_captured = False
        if last is not None:
            last[1].wait()  # what it reads is written for the next
        captured = self._ready(step, None)
        if captured is None:
            return None
        self._put_on_queue(captured)
        self._last = captured, self._device.record_event()
        return torch.empty(0, self._model.spec.vocab_size)

    @property
    def follows(self) -> bool:
        """Whether it can `begin_next`."""
        return self._looks_up and self._is_single and self._states is None

    def begin_next(self) -> None:
        """Begin the step behind the last one, whose tokens the first rank shares.

        Raises RankError where the last step was not captured.
        """
        if self._last is None or self._collective is None:
            raise RankError(f"this rank captures no steps, and the first one does: {self.failure}")
        captured, _ = self._last
        if captured.runs is None:
            self._advance(captured)
        self._collective.share(captured.step.token_ids)
        self._put_on_queue(captured)
        self._last = captured, self._device.record_event()

    @override
    def _compute_layers(self, captured: CapturedGraph, weights: Weights) -> torch.Tensor:
        states = super()._compute_layers(captured, weights)
        step = captured.step
        graph_ops.move_on(step.positions, captured.runs, step.axes)
        return states
