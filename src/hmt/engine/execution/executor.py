"""Executors: walking a model's layers for one step.

`PlainExecutor` is the truth: it reads each block when it needs it.  `OverlappedExecutor` computes
the same with the same kernels in the same order, and only asks for blocks earlier.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise

import torch
from typing_extensions import override

from hmt.base.errors import RankError
from hmt.base.trace import Tracer
from hmt.contracts.model import FusedLayers, Model
from hmt.contracts.sharding import RankShare
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Priority, Weights
from hmt.engine.execution.graphs.following import FollowingGraphRunner
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.execution.graphs.split_runner import SplitGraphRunner
from hmt.engine.execution.pipeline import PipelineStage
from hmt.engine.execution.prefetch import ReadAhead
from hmt.engine.loading.device import OnDevice
from hmt.engine.outputs.prompt_outputs import (
    HiddenObserver,
    PromptOutputSink,
    PromptOutputSource,
)
from hmt.kernels.ops import LogitStats
from hmt.memory.device import sent
from hmt.weights.adapters import AdapterStore, AdapterViews


class DeviceStages:
    """Where layers and head compute, and what they compute from brought there.

    Without a device everything stays where it is.
    """

    def __init__(
        self, on_devices: Sequence[OnDevice] = (), stage_devices: Mapping[int, int] | None = None
    ) -> None:
        """`stage_devices` says on which device a stage begins; see `Plan.stage_devices`."""
        self._devices = {on_device.index: on_device.device for on_device in on_devices}
        self._weights = [on_device.weights for on_device in on_devices]
        self._stage_devices = dict(stage_devices or {})
        self._steps: dict[int | None, Step] = {}  # by device; None: in host memory

    @property
    def alike(self) -> bool:
        """Whether all stages compute on the CPU."""
        return not self._devices

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What is called in the body goes on the devices' queues, if there are any.

        The first device is the current one, on which what knows no device is launched.
        """
        with ExitStack() as streams:
            for device in reversed(self._devices.values()):
                streams.enter_context(device.compute_stream())
            yield

    def at(self, stage: int) -> AbstractContextManager[None]:
        """In the body, the device of `stage` is the current one, where there are several."""
        device = self._stage_devices.get(stage)
        if device is None or len(self._devices) == 1:
            return nullcontext()
        return self._devices[device].compute_stream()

    def begin(self, step: Step) -> None:
        """`step` is computed next."""
        self._steps = {None: step}
        for weights in self._weights:
            weights.begin(len(step.token_ids))

    def step(self, stage: int) -> Step:
        """The step as `stage` needs it."""
        device = self._stage_devices.get(stage)
        if device not in self._steps:
            assert device is not None
            step, where = self._steps[None], self._devices[device].where
            tensors = step.token_ids, step.positions, step.logit_rows
            ids, positions, rows = (sent(tensor, where) for tensor in tensors)
            axes = None if step.axes is None else sent(step.axes, where)
            self._steps[device] = Step(
                ids, positions, step.segments, rows,
                axes=axes, image_rows=step.image_rows, layer_features=step.layer_features,
            )  # fmt: skip
        return self._steps[device]

    def fetch(self, hidden: torch.Tensor, stage: int) -> torch.Tensor:
        """Hidden states, where `stage` computes.

        From device to device the CPU does not wait: the queue of the one waits for the other's.
        """
        if not self._devices:
            return hidden
        device = self._stage_devices.get(stage)
        return hidden.to("cpu" if device is None else self._devices[device].where)


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


class Executor(ABC):
    """Runs steps.

    surveys      what is known of each row that the last step returned; empty where none was
                 computed
    expert_uses  steps that used each expert, by layer, besides those that leased it
    has_captured  whether the last step was captured on a device, and took longer for it
    """

    surveys: Sequence[LogitStats] = ()
    has_captured: bool = False

    def __init__(
        self,
        model: Model,
        weights: Weights,
        kv: KVCache,
        tracer: Tracer | None = None,
        places: DeviceStages | None = None,
        scored_rows: int = 1,
        *,
        adapters: AdapterStore | None = None,
        share: RankShare | None = None,
    ) -> None:
        """`scored_rows` of logits are looked at together; `adapters` are those that steps name.

        `share`: what this process has of the model; None: all of it.
        """
        self._views = None if adapters is None else AdapterViews(weights, adapters)
        self._model = model
        self._weights = weights
        self._kv = kv
        self._places = places or DeviceStages()
        self._pipeline = PipelineStage(model, share)
        self._stages = _Stages(model, tracer)
        self._outputs = PromptOutputSink(model, weights, scored_rows)
        self._observer: HiddenObserver | None = None

    @contextmanager
    def _weights_of(self, step: Step) -> Iterator[Weights]:
        """Weights as the step's layers have them.  Raises AdapterError where these take none."""
        if self._views is None or not step.has_adapters:
            yield self._weights
            return
        view = self._views.of(step)
        yield view
        view.check()

    def watch(self, observer: HiddenObserver | None) -> None:
        """Let `observer` see the hidden states of each step from now on."""
        self._observer = observer

    def close(self) -> None:
        """Let go what was recorded of steps, and who observes them; none is computed any more."""
        self._observer = None

    @property
    def expert_uses(self) -> Mapping[int, Sequence[int]]:
        """None, by default."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how steps run."""
        return ()

    def replayed_s(self, times: int) -> float:
        """See GraphRunner; 0 where nothing is captured."""
        return 0.0

    def has_begun(self, step: Step) -> bool:
        """See GraphRunner."""
        return False

    @property
    def follows(self) -> bool:
        """See FollowingGraphRunner."""
        return False

    def begin_next(self) -> None:
        """See FollowingGraphRunner.  Raises RankError where steps are not captured."""
        raise RankError("this rank captures no steps, and the first one does")

    def verifies(self, sequences: int) -> bool:
        """Whether steps of so many sequences take draft tokens, and change no answer by them."""
        return self._places.alike

    @torch.inference_mode()
    def run(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor:
        """Logits f32 [rows, vocab] of the step's logit rows, valid until the next step.

        Appends the step's tokens to the KV.  `viewer` is shown its scored and its pooled rows.

        Raises DiskReadError or NumericsError of a block that could not be loaded; the KV of the
        step's sequences is then incomplete.
        """
        with self._places.computing():
            return self._run(step, viewer)

    def _show(
        self, step: Step, layer: int, hidden: torch.Tensor, viewer: PromptOutputSource | None
    ) -> None:
        """Let `viewer` see hidden states behind `layer` layers, where it wants these."""
        if viewer is not None and layer in viewer.layers:
            self._outputs.show_layer(step, layer, hidden, viewer)

    def _end(self, step: Step, hidden: torch.Tensor) -> None:
        """Show hidden states behind the last layer; on a device not before its last kernel."""
        if self._observer is not None:
            self._observer.see(step, hidden)

    @abstractmethod
    def _run(self, step: Step, viewer: PromptOutputSource | None) -> torch.Tensor:
        """As `run`, on the queues of the devices."""


class PlainExecutor(Executor):
    """One block after the other, nothing ahead of time."""

    @override
    def _run(self, step: Step, viewer: PromptOutputSource | None) -> torch.Tensor:
        with self._weights_of(step) as weights:
            return self._compute(step, viewer, weights)

    def _compute(
        self, step: Step, viewer: PromptOutputSource | None, weights: Weights
    ) -> torch.Tensor:
        places, layers = self._places, self._model.spec.layers
        places.begin(step)
        hidden = self._pipeline.begin(step, self._weights)
        self._stages.begin()
        self._show(step, 0, hidden, viewer)
        for index in self._pipeline.layers:
            hidden, here = places.fetch(hidden, index), places.step(index)
            with places.at(index):
                hidden = self._model.layer(index, hidden, here, weights, self._kv)
            self._show(step, index + 1, hidden, viewer)
            self._stages.ended(index)
        hidden = self._pipeline.end(step, hidden)
        logits = torch.empty(0, self._model.spec.vocab_size)
        if not self._pipeline.has_head:
            return logits
        if len(step.logit_rows) or step.has_prompt_outputs:
            hidden = places.fetch(hidden, layers)
        if viewer is not None:
            with places.at(layers):
                self._outputs.show(step, hidden, viewer)
        if len(step.logit_rows):
            wanted = hidden[places.step(layers).logit_rows]
            with places.at(layers):
                logits = self._model.head(wanted, self._weights).cpu()
            self._stages.ended(layers)
        self._end(step, hidden)
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
        graphs: GraphRunner | SplitGraphRunner | str | None = None,
        scored_rows: int = 1,
        shown_layers: Sequence[int] = (),
        *,
        adapters: AdapterStore | None = None,
        share: RankShare | None = None,
    ) -> None:
        """`graphs` computes what it can of steps after their embedding, or why there are none.

        None where no device takes part.  `shown_layers`: behind so many layers a viewer may want
        hidden states.
        """
        super().__init__(
            model, weights, kv, tracer, places, scored_rows, adapters=adapters, share=share
        )
        self._ahead = ahead
        self.graphs = None if isinstance(graphs, str) else graphs
        self._obstacle = graphs if isinstance(graphs, str) else ""
        self._together: Sequence[tuple[range, FusedLayers]] = ()
        if self._places.alike:
            self._together = _together(model, self._pipeline.layers, weights, kv, shown_layers)

    @override
    def watch(self, observer: HiddenObserver | None) -> None:
        super().watch(observer)
        if self.graphs is not None:
            self.graphs.watch(observer)

    @override
    def close(self) -> None:
        graphs, self.graphs = self.graphs, None
        if graphs is not None:
            graphs.watch(None)
            self._obstacle = graphs.failure  # which a summary may still tell

    @property
    @override
    def expert_uses(self) -> Mapping[int, Sequence[int]]:
        return dict(use for _, part in self._together for use in part.expert_uses.items())

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        reason = self._obstacle if self.graphs is None else self.graphs.failure
        if not reason and self.graphs is not None and self._views is not None and self._views.used:
            reason = "some had adapters, which captures do not add"
        if not reason:
            return ()
        return (f"decoding steps are not captured, and slower for it: {reason}",)

    @torch.inference_mode()
    @override
    def replayed_s(self, times: int) -> float:
        if self.graphs is None:
            return 0.0
        with self._places.computing():
            return self.graphs.replayed_s(times)

    @override
    def has_begun(self, step: Step) -> bool:
        return isinstance(self.graphs, GraphRunner) and self.graphs.has_begun(step)

    @property
    @override
    def follows(self) -> bool:
        return isinstance(self.graphs, FollowingGraphRunner) and self.graphs.follows

    @torch.inference_mode()
    @override
    def begin_next(self) -> None:
        if not isinstance(self.graphs, FollowingGraphRunner):
            return super().begin_next()
        with self._places.computing():
            self.graphs.begin_next()

    @override
    def verifies(self, sequences: int) -> bool:
        if self.graphs is None:
            return super().verifies(sequences)
        # Only captured steps compute drafts' tokens as if each were alone.
        adapted = self._views is not None and self._views.in_use
        return not adapted and self.graphs.verifies(sequences)

    @override
    def _run(self, step: Step, viewer: PromptOutputSource | None) -> torch.Tensor:
        ahead, places, layers = self._ahead, self._places, self._model.spec.layers
        ahead.step_begins(len(step.token_ids))
        places.begin(step)
        self._stages.begin()
        self.surveys = ()
        if self.graphs is not None and step.image_rows is None and not step.has_adapters:
            logits = self.graphs(step, viewer)
            self.has_captured = self.graphs.has_captured
            if logits is not None:
                self.surveys = self.graphs.surveys
                self._stages.ended(None)
                ahead.step_ends()
                return logits
        self._request(self._pipeline.layers.start)
        hidden = self._pipeline.begin(step, self._weights)
        self._show(step, 0, hidden, viewer)
        with self._weights_of(step) as weights:
            for index in self._pipeline.layers[self._compute_together(step, hidden, viewer) :]:
                self._request(index)
                hidden, here = places.fetch(hidden, index), places.step(index)
                with places.at(index):
                    hidden = self._model.layer(index, hidden, here, weights, self._kv)
                self._show(step, index + 1, hidden, viewer)
                ahead.stage_ends(index)
                self._stages.ended(index)
        hidden = self._pipeline.end(step, hidden)
        logits, rows = torch.empty(0, self._model.spec.vocab_size), len(step.logit_rows)
        if not self._pipeline.has_head:
            rows, viewer = 0, None
        elif rows or step.has_prompt_outputs:
            self._request(layers)
            hidden = places.fetch(hidden, layers)
        if viewer is not None:
            with places.at(layers):
                self._outputs.show(step, hidden, viewer)
        if rows:
            # Rows ascend and differ: as many as there are tokens are all of them.
            wanted = hidden if rows == len(hidden) else hidden[places.step(layers).logit_rows]
            with places.at(layers):
                logits = self._model.head(wanted, self._weights).cpu()
            self._stages.ended(layers)
        self._end(step, hidden)
        ahead.stage_ends(layers)
        ahead.step_ends()
        return logits

    def _compute_together(
        self, step: Step, hidden: torch.Tensor, viewer: PromptOutputSource | None
    ) -> int:
        """Compute many layers in a call; how many were.  `hidden` changes as they change it."""
        computed = 0
        adapters = None
        if self._views is not None and step.has_adapters:
            adapters = self._views.of(step).adapters
        for layers, together in self._together:
            if not together(hidden, step, adapters):
                return computed
            computed += len(layers)
            self._show(step, layers.stop, hidden, viewer)
        if computed:
            self._stages.ended(None)
        return computed

    def _request(self, stage: int) -> None:
        blocks = self._ahead.blocks(stage)
        if blocks or self._ahead.asks_for_experts:  # and lets go of those that were not chosen
            self._weights.request(blocks, Priority.PREFETCH)


def _together(
    model: Model, computed: range, weights: Weights, kv: KVCache, shown_layers: Sequence[int]
) -> Sequence[tuple[range, FusedLayers]]:
    """All layers that are `computed` as few calls, between which hidden states are shown.

    () where that cannot be.
    """
    borders = sorted({computed.start, *shown_layers, computed.stop})
    parts = list[tuple[range, FusedLayers]]()
    for layers in (range(*pair) for pair in pairwise(borders)):
        part = model.fused_layers(layers, weights, kv)
        if part is None:
            return ()
        parts.append((layers, part))
    return parts
