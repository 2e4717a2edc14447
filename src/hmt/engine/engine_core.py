"""A loaded model at work, on the engine's thread: schedule a step, run it, accept its logits."""

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hmt.base.errors import Cancelled, HMTError
from hmt.base.trace import Tracer
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine.beam_search import BeamSearch
from hmt.engine.config import EngineConfig
from hmt.engine.execution.warmup import is_slow_at_first, prompts_to_warm, warm_up
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prefix_cache import save_some, scope_of
from hmt.engine.loading.prepared import Prepared
from hmt.engine.model_runner import ModelRunner
from hmt.engine.outputs.constraints import UnsettledForms
from hmt.engine.outputs.output_processor import OutputProcessor, PromptOutputRows, reported
from hmt.engine.scheduling.scheduler import Scheduler
from hmt.engine.scheduling.sequence import PromptEnd, SequenceState
from hmt.engine.speculation.opening import open_speculator
from hmt.engine.step_accounts import StepAccounts
from hmt.engine.teacher_forcing import TeacherForcing
from hmt.kernels.ops import LogitStats

# A segment, and each of its rows of logits with what is known of it.
_Rows = tuple[SegmentRequest, list[tuple[torch.Tensor, LogitStats | None]]]


class EngineCore:
    """The loop of steps, and their account.  For the engine's thread only.

    load    as of the last step; other threads may read it
    steps   until now
    """

    def __init__(
        self,
        prepared: Prepared,
        config: EngineConfig,
        memory: Memory,
        tracer: Tracer,
    ) -> None:
        self.memory = memory
        self._plan = prepared.plan
        self._spec = prepared.model.spec
        self._forms = UnsettledForms()
        border = self._spec.rotary_border

        def scope(sequence: SequenceState) -> str:
            return scope_of(sequence, border, shared=config.prefix_shared)

        watched = prepared.divided is None  # of several ranks none raises precision by itself
        self.runner = ModelRunner(prepared, config, memory, tracer, watched=watched)
        self.speculator = open_speculator(
            prepared, config, memory, scope, tracer, self.runner.verifies, self._kv_of
        )
        self.scheduler = Scheduler(
            memory.kv.allocator,
            max_prefill_tokens=prepared.plan.max_prefill_tokens,
            max_batch=config.max_batch,
            prefixes=memory.prefixes,
            salt=scope,
            border=border,
            checkpoints=bool(self._spec.state_bytes) and memory.prefixes is not None,
            begin_answer=self._begin_answer,
            token_window=self._spec.token_window,
            draft=self.speculator.draft,
            alternatives=self.speculator.alternatives,
        )
        self._processors: dict[int, OutputProcessor] = {}  # by number, until they have ended
        # f32 [vocab] and what is known of it; as long as a sequence may begin with it.
        self._prompt_ends: WeakKeyDictionary[PromptEnd, tuple[torch.Tensor, LogitStats | None]]
        self._prompt_ends = WeakKeyDictionary()
        self._tracer = tracer
        self.load = self.scheduler.load
        self.steps = 0
        self.accounts = StepAccounts()
        self._warm_up()
        self.reset_account()

    def _warm_up(self) -> None:
        """Let a GPU compile and capture now, and not while the first request waits."""
        memory = self.memory
        # A trace of experts is of requests alone.
        if memory.on_device is None or memory.trace is not None:
            return
        if not is_slow_at_first(memory.on_device.device.where):
            return
        prompts = prompts_to_warm(self._plan, memory.kv.allocator.capacity_tokens)
        if not warm_up(self.logits, prompts, self._spec.vocab_size):
            self.runner.abandon()
        self.steps = 0

    def reset_account(self) -> None:
        """Count from zero."""
        self.accounts = StepAccounts()
        self.speculator.reset_account()
        self.runner.reset_account()

    def advance(self) -> bool:
        """One step for all requests; False when none waits.  Never raises: requests fail instead.

        When none waits, some pages that ended sequences leave to others are saved.
        """
        try:
            if self.memory.images is not None:
                self.memory.images.unload_idle()
            return self._advance()
        except Exception as error:  # or their owners would wait for a thread that has ended
            self.runner.abandon()
            self._fail_all(reported(error))
            return True

    def wait_s(self) -> float | None:
        """Seconds after which `advance` may have something to do without requests."""
        return None if self.memory.images is None else self.memory.images.wait_s()

    def _advance(self) -> bool:
        self._forms.settle(self._settled)
        begin = time.perf_counter()
        output = self.scheduler.next_step()
        self._tell_ended()
        if output is None:
            self.load = self.scheduler.load
            if self._forms.idle():
                return True
            return self.memory.prefixes is not None and save_some(self.memory.prefixes)
        output = self._with_images(output)
        if not output.segments:
            self.load = self.scheduler.load
            return True
        segments = (segment for segment in output.segments if not segment.is_branch)
        processors = [self._processors[segment.request] for segment in segments]
        viewer = PromptOutputRows(output, self._processors) if output.shows_prompts else None
        try:
            logits = self.runner.run(*self.speculator.with_viewer(output, viewer))
        except Exception as error:
            self.runner.abandon()
            for processor in processors:
                processor.state.fail(reported(error))
        else:
            processors += self._accept(output, logits)
        for processor in processors:
            if processor.state.finished:
                self.scheduler.retire(processor.state)
            else:
                self._forms.add(processor)
        self._tell_ended()
        self.load = self.scheduler.load
        self._count(output, begin)
        return True

    def _with_images(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step whose images are encoded: without requests of which one cannot be, which fail.

        All tokens of these are their prompts'.
        """
        failed = self.runner.encode_images(output)
        if not failed:
            return output
        left = tuple(one for one in output.segments if one.request not in failed)
        lost = output.num_tokens - sum(segment.length for segment in left)
        if not left:
            self.scheduler.kv.put_back(output.kv_operations)
        for number, error in failed.items():
            state = self._processors[number].state
            state.fail(reported(error))
            self.scheduler.retire(state)
        self._tell_ended()
        return replace(output, segments=left, prompt_tokens=output.prompt_tokens - lost)

    def _accept(self, output: SchedulerOutput, logits: torch.Tensor) -> list[OutputProcessor]:
        """Let each request of a step have its row of logits.

        Returns those that begin with the prompt of another of them.
        """
        for segment in output.segments:
            processor = self._processors[segment.request]
            processor.state.computed += segment.length - segment.drafts
            if processor.state.computed == processor.state.prompt_tokens:
                processor.prompt_computed()
        self._look_for_drift(output)
        forked: list[OutputProcessor] = []
        stats = self.runner.logit_stats or (None,) * len(logits)
        rows = zip(logits, stats, strict=True)
        parts = [(run, list(islice(rows, run.num_logit_rows))) for run in output.segments]
        branches = defaultdict[int, list[_Rows]](list)
        for segment, own in parts:
            if segment.is_branch:
                branches[segment.request].append((segment, own))
        for segment, own in parts:
            if not own or segment.is_branch:
                continue
            processor = self._processors[segment.request]
            if processor.state.computed == processor.state.prompt_tokens:
                keep_end = partial(self._keep_end, processor.state, *own[0])
                states = self.scheduler.fork(processor.state, keep_end)
                forked += (others := [self._processors[state.number] for state in states])
                for other in others:
                    if self.runner.watch is not None:
                        self.runner.watch.shares_prompt(processor.state, other.state)
                    other.advance(*own[0])
            processor.advance(*own[0])
            if segment.drafts:
                self._verify(processor, [(segment, own), *branches[segment.request]])
        self.speculator.observe(output, self._state)
        if output.num_drafts:
            self._look_for_drift(output)
        return forked

    def _look_for_drift(self, output: SchedulerOutput) -> None:
        if self.runner.watch is not None:
            self.runner.watch.computed(output, self._state)

    def _state(self, request: int) -> SequenceState:
        return self._processors[request].state

    def _verify(self, processor: OutputProcessor, drafts: Many[_Rows]) -> None:
        """Let a request choose by the rows behind a draft's tokens while it chose these.

        Each token is drawn as without draft tokens, from the same logits and with the same random
        number, so that they change no answer.  Of several drafts, which begin with different
        tokens, that one stays which begins with the token that was drawn; else the first.
        """
        state = processor.state
        verified = [tuple(segment.tokens[1:]) for segment, _ in drafts]
        first = state.tokens[-1]
        kept = next((n for n, tokens in enumerate(verified) if tokens[0] == first), 0)
        segment, rows = drafts[kept]
        accepted = 0
        for draft, row in zip(verified[kept], rows[1:], strict=True):
            if state.tokens[-1] != draft or not self._goes_on(processor):
                break
            accepted += 1
            state.computed += 1
            processor.advance(*row)
        self.scheduler.branches.keep(state, segment.sequence)
        if accepted < len(verified[kept]):
            self.scheduler.take_back(state)
        self.speculator.verified(state, verified, kept, accepted)

    def _kv_of(self, number: int) -> int:
        """The handle of a running request's sequence in the KV cache."""
        handle = self._processors[number].state.kv
        assert handle is not None, "it has a step to come"
        return handle

    def _goes_on(self, processor: OutputProcessor) -> bool:
        """Whether a request may choose another token now."""
        try:
            return self._forms.is_settled(processor) and not processor.state.finished
        except Exception as error:
            processor.state.fail(reported(error))
            return False

    def _keep_end(
        self, leader: SequenceState, logits: torch.Tensor, known: LogitStats | None
    ) -> PromptEnd:
        end = PromptEnd()
        self._prompt_ends[end] = logits.clone(), known
        if self.runner.watch is not None:
            self.runner.watch.keep_prompt(end, leader)
        return end

    def _begin_answer(self, sequence: SequenceState, end: PromptEnd) -> None:
        """The first token of a sequence whose prompt another has computed to the end."""
        processor = self._processors[sequence.number]
        if self.runner.watch is not None:
            self.runner.watch.begins_with(end, sequence)
        processor.advance(*self._prompt_ends[end])
        self._forms.add(processor)

    def _count(self, output: SchedulerOutput, begin: float) -> None:
        """A step has ended that began at `begin`."""
        self.steps += 1
        now = time.perf_counter()
        cost = self.runner.meter.lap(now - begin)
        captured = self.runner.has_captured
        wrong = self.speculator.step_took(output, cost.seconds, captured=captured)
        tokens = self.accounts.add(output, cost, wrong)
        self._tracer.record("step", "host", 0, begin, now, tokens)

    def _settled(self, processor: OutputProcessor, error: Exception | None) -> None:
        """A request has ended by its form."""
        if error is not None:
            processor.state.fail(reported(error))
        self.scheduler.retire(processor.state)
        self._tell_ended()

    def _tell_ended(self) -> None:
        """Tell the owners of all that have ended since the last call."""
        for sequence in self.scheduler.take_ended():
            sequence.image_hold = sequence.adapter = None
            self.speculator.ended(sequence)
            if self.runner.watch is not None:
                self.runner.watch.ended(sequence.number)
            if (processor := self._processors.pop(sequence.number, None)) is not None:
                processor.ended()

    def _fail_all(self, error: HMTError) -> None:
        """End all requests by `error`."""
        for sequence in self.scheduler.sequences():
            sequence.fail(error)
            self.scheduler.retire(sequence)
        self._tell_ended()
        self.load = self.scheduler.load

    def add(self, processors: Many[OutputProcessor]) -> None:
        """Queue requests whose states the scheduler has checked."""
        for processor in processors:
            self._processors[processor.state.number] = processor
            self.scheduler.add(processor.state)
        self.load = self.scheduler.load

    def cancel(self, sequence: SequenceState) -> None:
        """End a sequence that its owner no longer wants."""
        sequence.cancel()
        self.scheduler.retire(sequence)
        self._tell_ended()
        self.load = self.scheduler.load

    def close(self) -> None:
        """Fail what still runs, and free all memory."""
        self._fail_all(Cancelled("the model was closed while this request ran"))
        if self.memory.prefixes is not None:
            while save_some(self.memory.prefixes):
                pass
        if self.memory.ranks is not None:
            self.runner.executor.close()  # captures have sums in them, which ranks wait for to part
        self.memory.close()

    def logits(
        self, tokens: Many[int], rows: Many[int], prefill: int, adapter: int = 0
    ) -> torch.Tensor:
        """See LoadedModel.logits; `adapter` is the number of one that is held."""
        return self._teacher_forcing(adapter).logits(tokens, rows, prefill)

    def hidden_rows(self, tokens: Many[int]) -> "NDArray[np.float32]":
        """See LoadedModel.hidden_rows."""
        return self.runner.recorded(lambda: self.logits(tokens, [], len(tokens)))

    def keys_and_values(
        self, tokens: Many[int], see: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        """See LoadedModel.keys_and_values."""
        self._teacher_forcing().keys_and_values(tokens, self.memory.kv, see)

    def _teacher_forcing(self, adapter: int = 0) -> TeacherForcing:
        return TeacherForcing(
            self.scheduler.kv,
            self._run_alone,
            chunk=self._plan.max_prefill_tokens,
            vocab_size=self._spec.vocab_size,
            layers=sorted(self._spec.kv_layers),
            token_window=self._spec.token_window,
            adapter=adapter,
        )

    def search(
        self,
        prompt: Many[int],
        *,
        beams: int,
        new_tokens: int,
        eos_ids: frozenset[int],
        length_penalty: float,
        adapter: int = 0,
    ) -> BeamSearch:
        """A beam search that has not begun.  Raises BudgetError."""

        def run(segments: Many[SegmentRequest], is_prompt: bool) -> torch.Tensor:
            return self._run_alone(SchedulerOutput(tuple(segments)), is_prompt)

        return BeamSearch(
            self.scheduler.kv,
            run,
            prompt,
            beams=beams,
            new_tokens=new_tokens,
            eos_ids=eos_ids,
            length_penalty=length_penalty,
            chunk=self._plan.max_prefill_tokens,
            border=self._spec.rotary_border,
            token_window=self._spec.token_window,
            adapter=adapter,
        )

    def _run_alone(self, output: SchedulerOutput, is_prompt: bool) -> torch.Tensor:
        """The logits of a step that is no request's, which stay valid."""
        begin, tokens = time.perf_counter(), output.num_tokens
        output = replace(output, kv_operations=self.scheduler.kv.take())
        viewer = None
        if not is_prompt:  # as in requests' steps, so that these are captured once
            output, viewer = self.speculator.with_viewer(output, None)
        try:
            return self.runner.run(output, viewer).clone()
        finally:
            self.steps += 1
            cost = self.runner.meter.lap(time.perf_counter() - begin)
            self.accounts.add_alone(cost, tokens, is_prompt=is_prompt)
