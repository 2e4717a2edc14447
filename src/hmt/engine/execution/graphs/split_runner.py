"""Decoding steps of layers on several devices: a capture for each row of layers.

Each row begins with the hidden states that the one before has left on its device.  They are copied
on the devices' queues, and the CPU waits for the last row alone, whose results are the step's.
"""

from collections.abc import Sequence

import torch

from hmt.base.errors import MachineError
from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.outputs.prompt_outputs import HiddenObserver, PromptOutputSource
from hmt.kernels.ops import LogitStats
from hmt.memory.device import Device


class SplitGraphRunner:
    """Computes logits of steps of one token per run, as GraphRunner does.  For one thread.

    Steps begin when their tokens are known.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        rows: Sequence[tuple[Device, GraphRunner]],
        *,
        embeds: bool,
    ) -> None:
        """Each row's device and captures, in the order of layers; `weights` are those of all rows.

        embeds   whether tokens are looked up here, where the first row's device cannot
        """
        self._model, self._weights, self._embeds = model, weights, embeds
        self._rows, (self._last_device, self._last) = rows[:-1], rows[-1]

    @property
    def surveys(self) -> Sequence[LogitStats]:
        """What is known of each row of the last logits."""
        return self._last.surveys

    @property
    def has_captured(self) -> bool:
        """Whether the last step was captured, and took longer for it."""
        return any(row.has_captured for row in self.parts)

    @property
    def failure(self) -> str:
        """Why no step is captured any more; "" while they are."""
        return next((row.failure for row in self.parts if row.failure), "")

    @property
    def parts(self) -> tuple[GraphRunner, ...]:
        """The captures of each row."""
        return (*(row for _, row in self._rows), self._last)

    def __call__(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor | None:
        """See GraphRunner.

        Raises MachineError where a row cannot be captured, and recurrent state has advanced in
        those before it: the step cannot be computed in another way.
        """
        for row in self.parts:
            row.has_captured = False
            if not row.takes(step):
                return None
        given = self._model.embed(step, self._weights) if self._embeds else None
        for number, (device, row) in enumerate(self._rows):
            row.given = given
            with device.compute_stream():
                given = row.pass_on(step)
            if given is None:
                self._check_undone(after=number)
                return None
        self._last.given = given
        with self._last_device.compute_stream():
            logits = self._last(step, viewer)
        if logits is None:
            self._check_undone(after=len(self._rows))
        return logits

    def _check_undone(self, *, after: int) -> None:
        """A row was not captured, `after` so many others have computed the step."""
        if after and self._model.spec.state_bytes:
            raise MachineError(
                f"a step could not be captured ({self.failure}) when layers on another GPU had "
                "changed recurrent state: ask again, steps are not captured any more"
            )

    def watch(self, observer: HiddenObserver | None) -> None:
        """See GraphRunner."""
        self._last.watch(observer)

    def verifies(self, sequences: int) -> bool:
        """See GraphRunner."""
        return all(part.verifies(sequences) for part in self.parts)

    def replayed_s(self, times: int) -> float:
        """See GraphRunner: not measured."""
        return 0.0
