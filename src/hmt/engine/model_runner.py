"""The model runner: from what the scheduler emits to logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hmt.base.trace import Tracer
from hmt.contracts.model import Model
from hmt.contracts.step import SchedulerOutput, SegmentRequest, Step
from hmt.contracts.store import Weights
from hmt.engine.config import EngineConfig
from hmt.engine.drift.account import DriftAccount
from hmt.engine.drift.opening import Floats, open_watch, recorded
from hmt.engine.execution.executor import Executor
from hmt.engine.execution.opening import open_executor, open_precise_executor
from hmt.engine.execution.step_observers import open_observers
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.experts.observers import ObservedModel
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepared import Prepared
from hmt.engine.outputs.prompt_outputs import PromptOutputSource
from hmt.engine.step_meter import StepMeter
from hmt.kernels.ops import LogitStats
from hmt.weights import WeightsView


class ModelRunner:
    """Computes steps with a model's weights and KV cache, where its plan says.

    It needs nothing of a step but a `SchedulerOutput`: no request, and no state of the scheduler's.
    For the engine's thread only.

    executor           walks the layers
    watch              finds sequences that need higher precision; None: none is watched
    expert_prefetcher  of experts on the disk; None where there are none
    meter              what steps cost
    """

    def __init__(
        self,
        prepared: Prepared,
        config: EngineConfig,
        memory: Memory,
        tracer: Tracer,
        *,
        watched: bool = False,
    ) -> None:
        """`watched`: precision of sequences is raised where statistics tell of their drift.

        Raises ConfigError where these are damaged.
        """
        self._images = memory.images
        self._ranks = memory.ranks
        # Of the stages of a pipeline some may have no state, and know nothing of a journal of it.
        divided = prepared.divided
        self._takes_drafts = (
            divided is None or divided.share.stages == 1 or not divided.whole.state_bytes
        )
        self._weights = memory.layer_weights(prepared.plan)
        observers, self.expert_prefetcher = open_observers(
            prepared.model, prepared.plan, memory, prefetch=prepared.demand.prefetch_experts
        )
        model: Model = ObservedModel(prepared.model, observers) if observers else prepared.model
        weights: Weights = self._weights
        if observers:
            weights = WeightsView(self._weights, observers=observers)
        self.executor = open_executor(prepared, config, memory, tracer, model, weights)
        self.watch = open_watch(prepared) if watched else None
        self._precise: Executor | None = None
        if self.watch is not None:
            self.executor.watch(self.watch)
            self._precise = open_precise_executor(prepared, memory, tracer, self._weights)
        self._logit_stats: Sequence[LogitStats | None] = ()
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
        if self._ranks is None:
            return self._run_here(output, viewer, inputs)
        step = Step.build(output.segments, output.logit_rows, inputs)
        self._ranks.send(output, begun=self.executor.has_begun(step))
        try:
            logits = self.executor.run(step, viewer)
            self._logit_stats = self.executor.surveys
        except Exception as error:
            raise self._ranks.ended(error) from error
        self._ranks.check()  # a GPU's queue goes on behind a sum that was given up
        return logits

    def _run_here(
        self,
        output: SchedulerOutput,
        viewer: PromptOutputSource | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        raised = [segment for segment in output.segments if segment.raised]
        if not raised:
            logits = self._run(self.executor, output, viewer, inputs)
            self._logit_stats = self.executor.surveys
            return logits
        return self._run_both(output, raised, viewer)

    def _run(
        self,
        executor: Executor,
        output: SchedulerOutput,
        viewer: PromptOutputSource | None,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = Step.build(output.segments, output.logit_rows, inputs)
        if self._images is not None:
            step = self._images.fill(step, output)
        return executor.run(step, viewer)

    def _run_both(
        self,
        output: SchedulerOutput,
        raised: Sequence[SegmentRequest],
        viewer: PromptOutputSource | None,
    ) -> torch.Tensor:
        """`run` where the last segments are `raised`: first the others, as if these were alone."""
        assert self._precise is not None and self.watch is not None and output.logit_rows is None
        self.watch.account.tokens += sum(segment.length for segment in raised)
        self._logit_stats = ()
        others, parts = output.segments[: -len(raised)], list[torch.Tensor]()
        if others:
            parts.append(self._run(self.executor, replace(output, segments=others), viewer))
            self._logit_stats = self.executor.surveys
        parts.append(self._run(self._precise, replace(output, segments=tuple(raised)), viewer))
        if self._logit_stats:
            self._logit_stats = *self._logit_stats, *[None] * len(parts[-1])
        return torch.cat(parts)

    def encode_images(self, output: SchedulerOutput) -> dict[int, Exception]:
        """Encode images of a step before it is run.  By request, why its images cannot be."""
        failed = {} if self._images is None else self._images.encode(output)
        if failed:
            self.abandon()
        return failed

    @property
    def logit_stats(self) -> Sequence[LogitStats | None]:
        """What is known of each row of the last logits; empty where nothing is."""
        return self._logit_stats

    def recorded(self, run: Callable[[], object]) -> Floats:
        """Rows of hidden states that a watch would see of steps that `run` computes.

        f32 [rows, channels]
        """
        return recorded(self.executor, run, self.watch)

    @property
    def drift(self) -> DriftAccount | None:
        """Which sequences were computed in higher precision; None: no sequence is watched."""
        return None if self.watch is None else replace(self.watch.account)

    def reset_account(self) -> None:
        """Count from zero."""
        self.meter.lap(0.0)
        if self.watch is not None:
            self.watch.account = DriftAccount()

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
        return self._takes_drafts and self.executor.verifies(sequences)

    @property
    def has_captured(self) -> bool:
        """See Executor."""
        return self.executor.has_captured

    def replayed_s(self, times: int) -> float:
        """See GraphRunner; 0 where nothing is captured."""
        seconds = self.executor.replayed_s(times)
        self.meter.lap(0.0)  # what it has copied belongs to no step
        return seconds
