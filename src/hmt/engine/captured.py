"""Decoding steps that compute on the device, captured once and then replayed.

A step of one token launches ten kernels a layer, and to launch one takes the CPU as long as a small
one takes the device.  Captured, a step is one launch.  What the CPU has to add, experts that are
not on the device, it is asked for at a desk while the step runs.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hmt.base.log import warn_once
from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.kernels import ops
from hmt.kernels.expert_teams import Desk, Served
from hmt.kvcache import PagedKV
from hmt.memory.device import Device

_SHORTEST = 1024  # positions; kernels are launched for the longest context of a capture
_MOST_CAPTURES = 16


@dataclass(slots=True)
class Captured:
    """A capture for so many runs of one token.

    hidden  what the step begins with
    step    of the tensors that kernels read; its runs are those of the step that is computed now
    runs    where tokens lie, in tensors that stay where they are; None where kernels read `step`
    logits  the result in host memory
    """

    hidden: torch.Tensor
    step: Step
    runs: ops.PagedRuns | None
    replay: Callable[[], torch.Tensor] | None = None
    logits: torch.Tensor | None = None


class CapturedDecoding:
    """Computes logits of steps of one token per run.  For one thread."""

    def __init__(
        self,
        model: Model,
        weights: Weights,
        kv: PagedKV,
        device: Device,
        desk: Desk | None = None,
    ) -> None:
        """All blocks of layers and head stay on `device`, and the keys and values are there.

        desk   where teams ask for what other experts there are
        """
        self._model = model
        self._weights = weights
        self._kv = kv
        self._device = device
        self._desk = desk
        self.served = Served(0, 0.0, 0.0)
        self._captured: OrderedDict[tuple[int, int], Captured] = OrderedDict()
        self._works = True

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Logits [tokens, vocab] in host memory, valid until the next call; None for other steps.

        hidden [tokens, hidden_size] is in host memory, and so are the tensors of `step`.
        """
        tokens = len(hidden)
        decodes = all(run.length == 1 for run in step.runs)
        if not self._works or not decodes or len(step.logit_rows) != tokens:
            return None
        if self._desk is not None and tokens > self._desk.tokens:
            return None
        longest = max(run.context for run in step.runs)
        key = tokens, max(_SHORTEST, 1 << (longest - 1).bit_length())
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._open(hidden, *key)
            if len(self._captured) > _MOST_CAPTURES:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        self._send(captured, hidden, step)
        if captured.replay is None:
            if not self._capture(captured, hidden, step):
                return None
            self._send(captured, hidden, step)  # computing has changed the hidden states
        return self._replay(captured)

    def _replay(self, captured: Captured) -> torch.Tensor:
        assert captured.replay is not None
        if self._desk is not None:
            self._desk.begin()
        logits = captured.replay()
        if captured.logits is None:
            pinned = logits.is_cuda
            captured.logits = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=pinned)
        captured.logits.copy_(logits, non_blocking=True)
        arrived = self._device.mark()
        if self._desk is not None:
            self.served = self.served + self._desk.serve(len(logits))
        arrived.wait()
        return captured.logits

    def _open(self, hidden: torch.Tensor, tokens: int, context: int) -> Captured:
        where = self._device.where
        with torch.inference_mode(False):
            own = torch.empty(hidden.shape, dtype=hidden.dtype, device=where)
            ids, positions = (torch.zeros(tokens, dtype=torch.int64, device=where) for _ in "ab")
        step = Step(ids, positions, (), torch.arange(tokens, device=where))
        return Captured(own, step, ops.fixed_runs(where, tokens, context))

    def _send(self, captured: Captured, hidden: torch.Tensor, step: Step) -> None:
        captured.hidden.copy_(hidden, non_blocking=True)
        own = captured.step
        own.positions.copy_(step.positions, non_blocking=True)
        captured.step = Step(own.token_ids, own.positions, step.runs, own.logit_rows)
        if captured.runs is not None:
            ops.fill_runs(captured.runs, self._kv.paged_runs(step))
            self._kv.hold(captured.step, captured.runs)

    def _capture(self, captured: Captured, hidden: torch.Tensor, step: Step) -> bool:
        if self._desk is not None:
            self._desk.is_open = True  # nobody waits yet: all has been answered
        try:
            self._compute(captured, self._weights)  # compiles kernels, and makes what they keep
            self._send(captured, hidden, step)  # what was made for a step belongs into the capture
            captured.replay = self._record(captured)
        except RuntimeError as error:
            self._works = False
            warn_once("capture", f"steps cannot be captured ({error}): decoding will be slower")
        finally:
            if self._desk is not None:
                self._desk.is_open = False
        return self._works

    def _record(self, captured: Captured) -> Callable[[], torch.Tensor]:
        return self._device.capture(lambda: self._compute(captured, self._weights))

    def _compute(self, captured: Captured, weights: Weights) -> torch.Tensor:
        states = captured.hidden
        for index in range(self._model.spec.layers):
            states = self._model.layer(index, states, captured.step, weights, self._kv)
        return self._model.head(states, weights)
