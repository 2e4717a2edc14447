"""A loaded model at work: steps, what they cost, and teacher forcing, on the engine's thread."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import pairwise

import torch

from hmt.base.errors import Cancelled, EmptyPromptError, RequestError
from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import Weights
from hmt.engine.config import EngineConfig
from hmt.engine.execution.executor import DeviceStages, Executor, OverlappedExecutor, PlainExecutor
from hmt.engine.execution.graphs.full import GraphDecoding
from hmt.engine.execution.graphs.kv_offload import KVOffloadGraphDecoding
from hmt.engine.execution.graphs.piecewise import PiecewiseGraphDecoding, can_run_piecewise
from hmt.engine.execution.prefetch import read_ahead
from hmt.engine.execution.warmup import is_slow_at_first, prompts_to_warm, warm_up
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.experts.observers import ObservedModel, ObservedWeights, StepObserver
from hmt.engine.experts.predictor import RouterPredictor
from hmt.engine.experts.prefetcher import ExpertPrefetcher
from hmt.engine.experts.trace_recorder import ExpertRecorder
from hmt.engine.loading.device import OnDevice
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prefix_cache import save_some, scope_of
from hmt.engine.loading.prepare import Prepared
from hmt.engine.prediction import StepTotals
from hmt.engine.request_limits import check_tokens
from hmt.engine.run_summary import Phase
from hmt.engine.scheduling.beam_search import BeamSearch
from hmt.engine.scheduling.constraints import UnsettledForms
from hmt.engine.scheduling.scheduled_step import Scheduled
from hmt.engine.scheduling.scheduler import Scheduler
from hmt.engine.scheduling.sequence import Sequence, told
from hmt.kernels import graph_ops, ops
from hmt.kvcache import PagedKV, TieredKV
from hmt.planner import scored_rows
from hmt.weights import DeviceCounters

# Tokens of a step for which the device asks the CPU for experts while it runs.
_MAX_PROMPT_LOGIT_ROWS = 32


class EngineCore:
    """The scheduler, the executor and their account.  For the engine's thread only."""

    def __init__(
        self, prepared: Prepared, config: EngineConfig, memory: Memory, tracer: Tracer
    ) -> None:
        self.memory = memory
        self._plan = prepared.plan
        self._vocab_size = prepared.model.spec.vocab_size
        self._layers = prepared.model.spec.layers
        self._forms = UnsettledForms()
        self._border = prepared.model.spec.rotary_border
        self.scheduler = Scheduler(
            memory.kv,
            max_prefill_tokens=prepared.plan.max_prefill_tokens,
            max_batch=config.max_batch,
            prefixes=memory.prefixes,
            salt=lambda sequence: scope_of(sequence, self._border, shared=config.prefix_shared),
            border=self._border,
            begun=self._forms.add,
        )
        self._expert_prefetcher: ExpertPrefetcher | None = None
        self._tracer = tracer
        on_device = memory.on_device
        self._weights = memory.weights if on_device is None else on_device.weights
        self._executor = self._make_executor(prepared, config)
        self._meter = _Meter(memory, tracer, self._expert_prefetcher)
        self.load = self.scheduler.load  # as of the last step; others may read it
        self.steps = 0  # until now
        self._warm_up()
        self.reset_account()

    def _make_executor(self, prepared: Prepared, config: EngineConfig) -> Executor:
        plan, store, kv = prepared.plan, self.memory.weights, self.memory.kv
        observers: list[StepObserver] = []
        if self.memory.trace is not None:
            foresight = RouterPredictor(prepared.model, store, plan)
            observers.append(ExpertRecorder(self.memory.trace, foresight))
        streams = any(block.kind is BlockKind.EXPERT for block in plan.blocks_in(Tier.DISK))
        if self.memory.transitions is not None and streams:
            self._expert_prefetcher = ExpertPrefetcher(
                prepared.model, store, plan, self.memory.transitions
            )
            observers.append(self._expert_prefetcher)
        model: Model = ObservedModel(prepared.model, observers) if observers else prepared.model
        weights: Weights = ObservedWeights(self._weights, observers) if observers else self._weights
        on_device = self.memory.on_device
        places = DeviceStages(self.memory.on_devices, plan.stage_devices)
        rows = scored_rows(prepared.demand, plan.max_prefill_tokens)
        if config.executor == "plain":
            return PlainExecutor(model, weights, kv, self._tracer, places, rows)
        ahead = read_ahead(
            prepared.model, prepared.plan, prepared.layouts, self.memory.weights,
            config.prefetch_distance, prepared.machine.disk_read_rate,
        )  # fmt: skip
        captured = None
        if on_device is not None:
            captured = self._capture(model, weights, plan, on_device, config.max_batch)
        return OverlappedExecutor(model, weights, kv, ahead, self._tracer, places, captured, rows)

    def _capture(
        self, model: Model, weights: Weights, plan: Plan, on_device: OnDevice, batch: int
    ) -> GraphDecoding | None:
        """Captured steps, where all but embedding, head and experts is on the device.

        Experts may be elsewhere if the device can ask for them.  So may feed-forward networks of a
        model without experts: those steps are captured in pieces.
        """
        if not model.spec.capturable:
            return None
        seldom: tuple[BlockKind, ...] = (BlockKind.EMBEDDING, BlockKind.EXPERT)
        in_pieces = can_run_piecewise(model, plan)
        head = all(
            home is Tier.DEVICE for b, home in plan.homes.items() if b.kind is BlockKind.HEAD
        )
        seldom += () if head else (BlockKind.HEAD,)
        homes = {home for block, home in plan.homes.items() if block.kind not in seldom}
        if homes != {Tier.DEVICE} and not in_pieces:
            return None
        kv, device = self.memory.kv, on_device.device
        if isinstance(kv, TieredKV):
            return self._capture_tiers(model, plan, kv, on_device, in_pieces=in_pieces)
        if not isinstance(kv, PagedKV):
            return None  # some layers compute on the CPU
        if homes != {Tier.DEVICE}:
            return PiecewiseGraphDecoding(model, on_device.weights, kv, device)
        experts = [block for block in plan.homes if block.kind is BlockKind.EXPERT]
        away = {b.layer for b in experts if plan.homes[b] is not Tier.DEVICE}
        if experts and weights is not on_device.weights:
            return None  # somebody listens to routers
        if not away:
            return GraphDecoding(model, on_device.weights, kv, device, head=head)
        if any(weights.moe_backend(layer) is None for layer in away):
            return None
        desk = on_device.weights.open_channel(
            tokens=min(batch, _MAX_PROMPT_LOGIT_ROWS),
            hidden=model.spec.hidden_size,
            top_k=model.spec.experts_per_token,
            dtype=model.dtype,
        )
        if desk is None:
            return None
        return GraphDecoding(model, on_device.weights, kv, device, desk, head=head)

    def _capture_tiers(
        self, model: Model, plan: Plan, kv: TieredKV, on_device: OnDevice, *, in_pieces: bool
    ) -> GraphDecoding | None:
        """The same over several levels of keys and values, where experts are on the device."""
        homes = {home for b, home in plan.homes.items() if b.kind is not BlockKind.EMBEDDING}
        there = homes == {Tier.DEVICE}
        weights, device = on_device.weights, on_device.device
        if not (there or in_pieces) or not graph_ops.has_kernels(device.where):
            return None
        return KVOffloadGraphDecoding(model, weights, kv, device, weights_piecewise=not there)

    def _warm_up(self) -> None:
        """Let a GPU compile and capture now, and not while the first request waits."""
        memory = self.memory
        # A trace of experts is of requests alone.
        if memory.on_device is None or memory.trace is not None:
            return
        if not is_slow_at_first(memory.on_device.device.where):
            return
        self.prompt, self.generation = Phase(), Phase()
        prompts = prompts_to_warm(self._plan, memory.kv.capacity_tokens)
        if not warm_up(self.logits, prompts, self._vocab_size):
            self._weights.abandon()
        self.steps = 0

    @property
    def expert_prefetch_gain(self) -> ABResult | None:
        """Whether guesses make steps faster, as the last trial found."""
        return None if self._expert_prefetcher is None else self._expert_prefetcher.verdict

    @property
    def expert_uses(self) -> Mapping[int, Many[int]]:
        """See Executor."""
        return self._executor.expert_uses

    def replayed_s(self, times: int) -> tuple[float, float]:
        """See GraphDecoding; 0, 0 where nothing is captured."""
        found = self._executor.replayed_s(times)
        self._meter.lap(0.0)  # what it has copied belongs to no step
        return found

    def account(self) -> tuple[Phase, Phase]:
        """What prompts and answers have cost until now."""
        return replace(self.prompt), replace(self.generation)

    def reset_account(self) -> None:
        """Count from zero."""
        self.prompt, self.generation = Phase(), Phase()
        self.decoded, self.prefilled = StepTotals(), StepTotals()
        self._meter.lap(0.0)

    def advance(self) -> bool:
        """One step for everyone; False when nobody waits.  Never raises: requests fail instead.

        When nobody waits, some of what ended texts leave to others is saved.
        """
        self._forms.settle(self._settled)
        begin = time.perf_counter()
        forked: list[Sequence] = []
        scheduled = self.scheduler.next_step()
        if scheduled is None:
            self.load = self.scheduler.load
            if self._forms.idle():
                return True
            return self.memory.prefixes is not None and save_some(self.memory.prefixes)
        viewer = _PromptOutputRows(scheduled) if scheduled.step.has_prompt_outputs else None
        try:
            logits = self._executor.run(scheduled.step, viewer)
        except Exception as error:
            self._weights.abandon()
            for sequence, _ in scheduled.advanced:
                sequence.fail(told(error))
        else:
            for sequence, count in scheduled.advanced:
                sequence.computed += count
                if sequence.computed == sequence.prompt_tokens:
                    sequence.read()
            known = self._executor.surveys or (None,) * len(logits)
            for sequence, row, survey in zip(scheduled.sampled, logits, known, strict=True):
                if sequence.computed == sequence.prompt_tokens:
                    forked += (others := self.scheduler.fork(sequence, row, survey))
                    for other in others:
                        other.advance(row, survey)
                sequence.advance(row, survey)
        for sequence in [*(sequence for sequence, _ in scheduled.advanced), *forked]:
            if sequence.finished:
                self.scheduler.retire(sequence)
            else:
                self._forms.add(sequence)
        self.load = self.scheduler.load
        self.steps += 1
        now = time.perf_counter()
        cost = self._meter.lap(now - begin)
        prompt, tokens = scheduled.prompt_tokens, len(scheduled.step.token_ids)
        self._tracer.record("step", "host", 0, begin, now, (prompt, tokens - prompt))
        # Tokens of one step share its reads and its time.
        self.prompt.add(cost, prompt, tokens)
        self.generation.add(cost, tokens - prompt, tokens)
        totals = self.prefilled if prompt else self.decoded
        totals.add(scheduled.step, cost.seconds, cost.disk_bytes)
        return True

    def _settled(self, sequence: Sequence, error: Exception | None) -> None:
        """A sequence has ended by its form."""
        if error is not None:
            sequence.fail(told(error))
        self.scheduler.retire(sequence)

    def add(self, sequences: Many[Sequence]) -> None:
        """Queue sequences that the scheduler has checked."""
        for sequence in sequences:
            self.scheduler.add(sequence)
        self.load = self.scheduler.load

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that its owner no longer wants."""
        sequence.cancel()
        self.scheduler.retire(sequence)
        self.load = self.scheduler.load

    def close(self) -> None:
        """Fail what still runs, and free all memory."""
        for sequence in self.scheduler.sequences():
            sequence.fail(Cancelled("the model was closed while this request ran"))
            self.scheduler.retire(sequence)
        if self.memory.prefixes is not None:
            while save_some(self.memory.prefixes):
                pass
        self.memory.close()

    def logits(self, tokens: Many[int], rows: Many[int], prefill: int) -> torch.Tensor:
        """See LoadedModel.logits."""
        return self._forced(tokens, rows, prefill, lambda kv: None)

    def search(
        self,
        prompt: Many[int],
        *,
        beams: int,
        new_tokens: int,
        eos_ids: frozenset[int],
        length_penalty: float,
    ) -> BeamSearch:
        """A beam search that has not begun.  Raises BudgetError."""

        def run(step: Step, is_prompt: bool) -> torch.Tensor:
            return self._run_alone(step, self.prompt if is_prompt else self.generation)

        return BeamSearch(
            self.memory.kv,
            run,
            prompt,
            beams=beams,
            new_tokens=new_tokens,
            eos_ids=eos_ids,
            length_penalty=length_penalty,
            chunk=self._plan.max_prefill_tokens,
            border=self._border,
        )

    def keys_and_values(
        self, tokens: Many[int], see: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        """See LoadedModel.keys_and_values."""

        def look(kv: int) -> None:
            run = Segment(kv, len(tokens) - 1, 0, 1)
            for layer in range(self._layers):
                see(layer, *self.memory.kv.read(layer, run))

        self._forced(tokens, [], len(tokens), look)

    def _forced(
        self, tokens: Many[int], rows: Many[int], prefill: int, look: Callable[[int], None]
    ) -> torch.Tensor:
        """See `logits`; `look` is given the handle of what the cache holds in the end."""
        self._check_forced(tokens, rows, prefill)
        chunk = self._plan.max_prefill_tokens
        starts = [*range(0, prefill, chunk), *range(prefill, len(tokens)), len(tokens)]
        parts = [torch.empty(0, self._vocab_size)]
        kv = self.memory.kv.open(len(tokens))
        try:
            for start, stop in pairwise(starts):
                run = Segment(kv, start, 0, stop - start, len(tokens), whole=len(tokens))
                own = [row - start for row in rows if start <= row < stop]
                phase = self.prompt if start < prefill else self.generation
                parts.append(self._run_forced(run, tokens[start:stop], own, phase))
            look(kv)
        finally:
            self.memory.kv.close(kv)
        return torch.cat(parts)

    def _check_forced(self, tokens: Many[int], rows: Many[int], prefill: int) -> None:
        if not tokens:
            raise EmptyPromptError("the prompt is empty; logits need at least one token")
        check_tokens(tokens, self._vocab_size)
        if not 0 <= prefill <= len(tokens):
            raise RequestError(f"prefill is {prefill}; there are {len(tokens)} tokens")
        if any(not 0 <= row < len(tokens) for row in rows) or list(rows) != sorted(rows):
            raise RequestError(f"rows must ascend within 0..{len(tokens) - 1}; got {list(rows)}")

    def _run_forced(
        self, run: Segment, tokens: Many[int], rows: list[int], phase: Phase
    ) -> torch.Tensor:
        step = Step(
            torch.tensor(tokens),
            torch.arange(run.start, run.context),
            (run,),
            torch.tensor(rows, dtype=torch.int64),
        )
        return self._run_alone(step, phase)

    def _run_alone(self, step: Step, phase: Phase) -> torch.Tensor:
        """A step's logits, which stay valid; its cost counts in `phase`."""
        begin, tokens = time.perf_counter(), len(step.token_ids)
        try:
            return self._executor.run(step).clone()
        finally:
            self.steps += 1
            phase.add(self._meter.lap(time.perf_counter() - begin), tokens, tokens)


class _Meter:
    """Reads what store, tracer and kernels have counted, lap by lap; for one thread."""

    def __init__(
        self, memory: Memory, tracer: Tracer, expert_prefetcher: ExpertPrefetcher | None
    ) -> None:
        self._counters = memory.weights.counters
        self._disk_counters = memory.weights.disk_counters
        self._prefetch_counters = memory.weights.prefetch_counters
        self._on_device = None if memory.on_device is None else memory.on_device.weights
        self._expert_prefetcher = expert_prefetcher
        self._tracer = tracer
        self._last = self._read()

    def lap(self, seconds: float) -> Phase:
        """All that was counted since the last lap, and a step's own `seconds`.

        Reads that end between two steps (prefetches for the next one) count with the next.
        """
        now, before = self._read(), self._last
        self._last = now
        return Phase(
            steps=1,
            seconds=seconds,
            waited_s=now.waited_s - before.waited_s,
            disk_s=now.disk_s - before.disk_s,
            converted_s=now.converted_s - before.converted_s,
            kernel_s=now.kernel_s - before.kernel_s,
            link_s=now.link_s - before.link_s,
            device_s=now.device_s - before.device_s,
            disk_bytes=now.disk_bytes - before.disk_bytes,
            useful_bytes=now.useful_bytes - before.useful_bytes,
            host_bytes=now.host_bytes - before.host_bytes,
            link_bytes=now.link_bytes - before.link_bytes,
            hits=now.hits - before.hits,
            pending=now.pending - before.pending,
            misses=now.misses - before.misses,
            expert_prefetches=now.expert_prefetches - before.expert_prefetches,
            expert_prefetch_hits=now.expert_prefetch_hits - before.expert_prefetch_hits,
            expert_prefetch_wasted_bytes=now.expert_prefetch_wasted_bytes
            - before.expert_prefetch_wasted_bytes,
            expert_prefetch_saved_s=now.expert_prefetch_saved_s - before.expert_prefetch_saved_s,
            experts=now.experts - before.experts,
            expert_reads=now.expert_reads - before.expert_reads,
        )

    def _read(self) -> Phase:
        counters, guesses, drive = self._counters, self._prefetch_counters, self._disk_counters()
        link = DeviceCounters() if self._on_device is None else self._on_device.counters
        return Phase(
            waited_s=counters.waited_s,
            disk_s=drive.busy_s,
            converted_s=self._tracer.total("convert", "host").seconds,
            kernel_s=ops.kernel_seconds(),
            link_s=link.link_s,
            device_s=link.waited_s,
            disk_bytes=drive.read_bytes,
            useful_bytes=drive.useful_bytes,
            host_bytes=counters.host_bytes,
            link_bytes=link.copied_bytes,
            hits=counters.hits,
            pending=counters.pending,
            misses=counters.misses,
            expert_prefetches=guesses.begun,
            expert_prefetch_hits=guesses.in_time + guesses.late,
            expert_prefetch_wasted_bytes=guesses.unneeded_bytes,
            experts=guesses.experts,
            expert_reads=guesses.expert_reads,
            expert_prefetch_saved_s=0.0
            if self._expert_prefetcher is None
            else self._expert_prefetcher.saved_s,
        )


class _PromptOutputRows:
    """Gives rows that are shown to the sequences whose prompts they are of."""

    def __init__(self, scheduled: Scheduled) -> None:
        self._scheduled = scheduled

    def logits(self, first: int, logits: torch.Tensor) -> None:
        """See Viewer."""
        owners = self._scheduled.scored[first : first + len(logits)]
        for row, (sequence, position) in zip(logits, owners, strict=True):
            sequence.score(position, row)

    def hidden(self, first: int, hidden: torch.Tensor) -> None:
        """See Viewer."""
        owners = self._scheduled.pooled[first : first + len(hidden)]
        for row, (sequence, position) in zip(hidden, owners, strict=True):
            if sequence.pool is not None:
                sequence.pool.add(position, row)
