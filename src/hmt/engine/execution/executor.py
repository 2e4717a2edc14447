"""Executors: walking a model's layers for one step.

`PlainExecutor` is the truth: it reads each block when it needs it.  `OverlappedExecutor` computes
the same with the same kernels in the same order, and only asks for blocks earlier.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from typing_extensions import override

from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, LeasedGroup, MoeBackend, Priority, Weights
from hmt.engine.execution.graphs.full import GraphDecoding
from hmt.engine.execution.prefetch import ReadAhead
from hmt.engine.loading.device import OnDevice
from hmt.engine.scheduling.prompt_outputs import PromptOutputSink, PromptOutputSource
from hmt.kernels.ops import LogitStats


class Executor(Protocol):
    """Runs steps.

    surveys   what is known of each row that the last step returned; none where nobody looked
    """

    surveys: Sequence[LogitStats]

    @property
    def expert_uses(self) -> Mapping[int, Sequence[int]]:
        """Steps that used each expert, by layer, besides those that leased it."""
        ...

    def replayed_s(self, times: int) -> tuple[float, float]:
        """See GraphDecoding; 0, 0 where nothing is captured."""
        ...

    def run(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor:
        """Logits f32 [rows, vocab] of the step's logit rows, valid until the next step.

        Appends the step's tokens to the KV.  `viewer` is shown its scored and its pooled rows.

        Raises DiskReadError or NumericsError of a block that could not be loaded; the KV of the
        step's sequences is then incomplete.
        """
        ...


class _DemandOnlyWeights:
    """Weights that ignore what is asked for ahead of time."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        return self._weights.lease(block)

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        return self._weights.lease_each(blocks)

    def resident(self, blocks: Sequence[BlockId]) -> None:
        return None

    def count(self, nbytes: int) -> None:
        pass

    def moe_backend(self, layer: int) -> MoeBackend | None:
        return self._weights.moe_backend(layer)

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        pass

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self._weights.routed(layer, hidden, experts, scales)

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self._weights.rows(block, name, ids)


class DeviceStages:
    """Where layers and head compute, and what they compute from brought there.

    Without a device everything stays where it is.
    """

    def __init__(self, on_device: OnDevice | None = None, stages: Collection[int] = ()) -> None:
        """`stages` begin on the device: layers by index, and with their number the head."""
        self._weights = None if on_device is None else on_device.weights
        self._device = None if on_device is None else on_device.device
        self._stages = frozenset(stages)
        self._steps: dict[bool, Step] = {}

    @property
    def alike(self) -> bool:
        """Whether all stages compute on the CPU."""
        return self._device is None

    def computing(self) -> AbstractContextManager[None]:
        """What is called in the body goes on the device's queue, if there is one."""
        return nullcontext() if self._device is None else self._device.compute_stream()

    def begin(self, step: Step) -> None:
        """`step` is computed next."""
        self._steps = {False: step}
        if self._weights is not None:
            self._weights.begin(len(step.token_ids))

    def step(self, stage: int) -> Step:
        """The step as `stage` needs it."""
        there = stage in self._stages
        if there and True not in self._steps:
            assert self._device is not None
            step, where = self._steps[False], self._device.where
            tensors = step.token_ids, step.positions, step.logit_rows
            ids, positions, rows = (tensor.to(where, non_blocking=True) for tensor in tensors)
            self._steps[True] = Step(ids, positions, step.segments, rows)
        return self._steps[there]

    def fetch(self, hidden: torch.Tensor, stage: int) -> torch.Tensor:
        """Hidden states, where `stage` computes."""
        if self._device is None:
            return hidden
        return hidden.to(self._device.where if stage in self._stages else "cpu")


class _Stages:
    """Tells a tracer when layers and head were computed, waits of theirs included."""

    def __init__(self, model: Model, tracer: Tracer | None) -> None:
        layers = model.spec.layers
        self._names = (*(f"layer {index}" for index in range(layers)), "head")
        self._all = f"layers 0-{layers - 1}"
        self._tracer = tracer or Tracer(capacity=0)
        self._since_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._since_s = time.perf_counter()

    def ended(self, stage: int | None) -> None:
        """A layer has been computed, or with their number the head; None: all layers together."""
        now = time.perf_counter()
        what = self._all if stage is None else self._names[stage]
        self._tracer.record("compute", "host", 0, self._since_s, now, what)
        self._since_s = now


class PlainExecutor(Executor):
    """One block after the other, nothing ahead of time."""

    surveys: Sequence[LogitStats] = ()
    expert_uses: Mapping[int, Sequence[int]] = {}

    def __init__(
        self,
        model: Model,
        weights: Weights,
        kv: KVCache,
        tracer: Tracer | None = None,
        places: DeviceStages | None = None,
        scored_rows: int = 1,
    ) -> None:
        """`scored_rows` of logits are looked at together."""
        self._model = model
        self._weights = _DemandOnlyWeights(weights)
        self._kv = kv
        self._places = places or DeviceStages()
        self._stages = _Stages(model, tracer)
        self._outputs = PromptOutputSink(model, self._weights, scored_rows)

    def replayed_s(self, times: int) -> tuple[float, float]:
        """See Executor: nothing is captured."""
        return 0.0, 0.0

    @torch.inference_mode()
    @override
    def run(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor:
        with self._places.computing():
            return self._run(step, viewer)

    def _run(self, step: Step, viewer: PromptOutputSource | None) -> torch.Tensor:
        places, layers = self._places, self._model.spec.layers
        places.begin(step)
        self._stages.begin()
        hidden = self._model.embed(step, self._weights)
        for index in range(layers):
            hidden, here = places.fetch(hidden, index), places.step(index)
            hidden = self._model.layer(index, hidden, here, self._weights, self._kv)
            self._stages.ended(index)
        logits = torch.empty(0, self._model.spec.vocab_size)
        if len(step.logit_rows) or step.has_prompt_outputs:
            hidden = places.fetch(hidden, layers)
        if viewer is not None:
            self._outputs.show(step, hidden, viewer)
        if len(step.logit_rows):
            hidden = hidden[places.step(layers).logit_rows]
            logits = self._model.head(hidden, self._weights).cpu()
            self._stages.ended(layers)
        return logits


class OverlappedExecutor(Executor):
    """Requests the dense blocks of the next layers while it computes the current one.

    How many layers, `ahead` says; the order wraps around, so while the head computes, the first
    layers of the next token are on their way.  Where nothing has to be read, all layers are
    computed together if the model can.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        kv: KVCache,
        ahead: ReadAhead,
        tracer: Tracer | None = None,
        places: DeviceStages | None = None,
        captured: GraphDecoding | None = None,
        scored_rows: int = 1,
    ) -> None:
        """`captured` computes what it can of steps after their embedding.

        `scored_rows` of logits are looked at together.
        """
        self.surveys: Sequence[LogitStats] = ()
        self._model = model
        self._weights = weights
        self._kv = kv
        self._ahead = ahead
        self._captured = captured
        self._places = places or DeviceStages()
        self._stages = _Stages(model, tracer)
        self._outputs = PromptOutputSink(model, self._weights, scored_rows)
        self._together = None
        if self._places.alike:
            self._together = model.fused_layers(range(model.spec.layers), weights, kv)

    @property
    @override
    def expert_uses(self) -> Mapping[int, Sequence[int]]:
        return {} if self._together is None else self._together.expert_uses

    @torch.inference_mode()
    def replayed_s(self, times: int) -> tuple[float, float]:
        """See GraphDecoding."""
        if self._captured is None:
            return 0.0, 0.0
        with self._places.computing():
            return self._captured.replayed_s(times)

    @torch.inference_mode()
    @override
    def run(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor:
        with self._places.computing():
            return self._run(step, viewer)

    def _run(self, step: Step, viewer: PromptOutputSource | None) -> torch.Tensor:
        ahead, places, layers = self._ahead, self._places, self._model.spec.layers
        ahead.step_begins(len(step.token_ids))
        places.begin(step)
        self._stages.begin()
        self.surveys = ()
        if self._captured is not None:
            logits = self._captured(step)
            if logits is not None:
                self.surveys = self._captured.surveys
                self._stages.ended(None)
                ahead.step_ends()
                return logits
        self._request(0)
        hidden = self._model.embed(step, self._weights)
        if self._together is not None and self._together(hidden, step):
            self._stages.ended(None)
        else:
            for index in range(layers):
                self._request(index)
                hidden, here = places.fetch(hidden, index), places.step(index)
                hidden = self._model.layer(index, hidden, here, self._weights, self._kv)
                ahead.stage_ends(index)
                self._stages.ended(index)
        logits, rows = torch.empty(0, self._model.spec.vocab_size), len(step.logit_rows)
        if rows or step.has_prompt_outputs:
            self._request(layers)
            hidden = places.fetch(hidden, layers)
        if viewer is not None:
            self._outputs.show(step, hidden, viewer)
        if rows:
            # Rows ascend and differ: as many as there are tokens are all of them.
            wanted = hidden if rows == len(hidden) else hidden[places.step(layers).logit_rows]
            logits = self._model.head(wanted, self._weights).cpu()
            self._stages.ended(layers)
        ahead.stage_ends(layers)
        ahead.step_ends()
        return logits

    def _request(self, stage: int) -> None:
        blocks = self._ahead.blocks(stage)
        if blocks or self._ahead.asks_for_experts:  # and lets go of those that were not chosen
            self._weights.request(blocks, Priority.PREFETCH)
