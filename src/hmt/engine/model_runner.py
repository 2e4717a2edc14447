"""The model runner: from what the scheduler emits to logits."""

from collections.abc import Sequence

import torch

from hmt.base.trace import Tracer
from hmt.contracts.model import MOST_DRAFTS, Model
from hmt.contracts.step import SchedulerOutput, Step
from hmt.contracts.store import Weights
from hmt.engine.config import EngineConfig
from hmt.engine.execution.executor import DeviceStages, Executor, OverlappedExecutor, PlainExecutor
from hmt.engine.execution.graphs.selection import captures_of
from hmt.engine.execution.prefetch import read_ahead
from hmt.engine.execution.step_observers import open_observers
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.experts.observers import ObservedModel
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import Prepared
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.engine.step_meter import StepMeter
from hmt.kernels.ops import LogitStats
from hmt.planner import scored_rows
from hmt.weights import WeightsView


class ModelRunner:
    """Computes steps with a model's weights and KV cache, where its plan says.

    It needs nothing of a step but a `SchedulerOutput`: no request, and no state of the scheduler's.
    For the engine's thread only.

    executor           walks the layers
    expert_prefetcher  of experts on the disk; None where there are none
    meter              what steps cost
    """

    def __init__(
        self, prepared: Prepared, config: EngineConfig, memory: Memory, tracer: Tracer
    ) -> None:
        self._images = memory.images
        self._weights = memory.layer_weights(prepared.plan)
        observers, self.expert_prefetcher = open_observers(
            prepared.model, prepared.plan, memory, prefetch=prepared.demand.prefetch_experts
        )
        model: Model = ObservedModel(prepared.model, observers) if observers else prepared.model
        weights: Weights = self._weights
        if observers:
            weights = WeightsView(self._weights, observers=observers)
        self.executor = _open_executor(prepared, config, memory, tracer, model, weights)
        self.meter = StepMeter(memory, tracer, self.expert_prefetcher)

    def run(
        self,
        output: SchedulerOutput,
        viewer: PromptOutputSource | None = None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits f32 [rows, vocab] of the step's logit rows, valid until the next step.

        Appends the step's tokens to the KV, where sequences must have the places that its
        `kv_operations` say.  `viewer` is shown its scored and its pooled rows; `inputs` are
        those of a Step.  Raises what `Executor.run` raises; then `abandon` ends what it left open.
        """
        step = Step.build(output.segments, output.logit_rows, inputs)
        if self._images is not None:
            step = self._images.fill(step, output)
        return self.executor.run(step, viewer)

    def encode_images(self, output: SchedulerOutput) -> dict[int, Exception]:
        """Encode images of a step before it is run.  By request, why its images cannot be."""
        failed = {} if self._images is None else self._images.encode(output)
        if failed:
            self.abandon()
        return failed

    @property
    def logit_stats(self) -> Sequence[LogitStats]:
        """What is known of each row of the last logits; empty where none was computed."""
        return self.executor.surveys

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how steps run."""
        return self.executor.notes

    @property
    def expert_prefetch_gain(self) -> ABResult | None:
        """Whether prefetched experts make steps faster, as the last trial found."""
        return None if self.expert_prefetcher is None else self.expert_prefetcher.verdict

    def abandon(self) -> None:
        """End reads and leases that an error has left open."""
        self._weights.abandon()

    def verifies(self, sequences: int) -> bool:
        """See Executor."""
        return self.executor.verifies(sequences)

    @property
    def has_captured(self) -> bool:
        """See Executor."""
        return self.executor.has_captured

    def replayed_s(self, times: int) -> float:
        """See GraphRunner; 0 where nothing is captured."""
        seconds = self.executor.replayed_s(times)
        self.meter.lap(0.0)  # what it has copied belongs to no step
        return seconds


def _open_executor(
    prepared: Prepared,
    config: EngineConfig,
    memory: Memory,
    tracer: Tracer,
    model: Model,
    weights: Weights,
) -> Executor:
    plan, kv = prepared.plan, memory.kv
    places = DeviceStages(memory.on_devices, plan.stage_devices)
    rows = scored_rows(prepared.demand, plan.max_prefill_tokens)
    if config.executor == "plain":
        view = WeightsView(weights, prefetch=False)
        return PlainExecutor(model, view, kv, tracer, places, rows)
    ahead = read_ahead(
        prepared.model, plan, prepared.layouts, memory.weights,
        config.prefetch_distance, prepared.machine.disk_read_rate,
    )  # fmt: skip
    tokens = max(config.max_batch, MOST_DRAFTS if config.speculate != "off" else 0)
    graphs = captures_of(model, weights, plan, memory.on_devices, kv, tokens, prepared.layouts)
    inputs = None if memory.draft is None else memory.draft.inputs
    layers = () if inputs is None else inputs.layers
    return OverlappedExecutor(model, weights, kv, ahead, tracer, places, graphs, rows, layers)
