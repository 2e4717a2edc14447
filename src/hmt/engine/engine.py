"""The engine: the API of the seed's appendix, and the loop that turns requests into tokens."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Many
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from hmt.base.errors import ContextLengthError, EmptyPromptError, HMTError, RequestError
from hmt.base.trace import Tracer
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.request import Completion, Request, TokenEvent
from hmt.contracts.step import Run, Step
from hmt.engine.config import EngineConfig
from hmt.engine.executor import Executor, OverlappedExecutor, PlainExecutor
from hmt.engine.loading import Memory, Prepared, allocate, prepare
from hmt.engine.sampler import SamplerState
from hmt.engine.scheduler import Scheduled, Scheduler
from hmt.engine.sequence import Sequence
from hmt.engine.summary import Phase, RunSummary
from hmt.memory import bind, peak_resident_bytes
from hmt.text import StopStrings, Tokenizer


class Engine:
    """Loads models and holds the options that they share.

    engine = hmt.Engine(quantization="w4a8", host_memory="64GiB")
    model = engine.load_model("path/to/checkpoint")
    print(model.infer(hmt.Request(input="Hello", max_new_tokens=64)).text)
    """

    def __init__(self, **options: Any) -> None:
        """Options are those of EngineConfig, sizes and paths as text.  Raises ConfigError.

        Binds this process to `numa` and sets torch's threads, if asked to.
        """
        self.config = EngineConfig.resolve(**options)
        if self.config.numa is not None:
            bind(*self.config.numa)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self._models: list[LoadedModel] = []

    def load_model(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> "LoadedModel":
        """Plan and load the checkpoint in folder `path`.

        `progress(bytes done, bytes in all)` is called while resident weights are read.  Raises
        CheckpointError, BudgetError, DiskReadError or NumericsError; nothing stays allocated then.
        """
        model = LoadedModel(prepare(Path(path), self.config), self.config, progress)
        self._models.append(model)
        return model

    def close(self) -> None:
        """Close all models."""
        while self._models:
            self._models.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LoadedModel:
    """A model that answers requests.  Thread-safe: callers' requests run in common steps.

    There is no thread of its own: whoever waits for tokens drives the steps, one caller at a time.
    """

    def __init__(
        self,
        prepared: Prepared,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.prepared = prepared
        self.tracer = Tracer()
        self.tokenizer = Tokenizer.open(prepared.checkpoint.path)
        self._memory: Memory = allocate(prepared, config, self.tracer, progress)
        self._scheduler = Scheduler(
            self._memory.kv,
            prefill_chunk=prepared.plan.prefill_chunk,
            max_batch=config.max_batch,
        )
        self._executor = _executor(prepared, config, self._memory)
        self._lock = threading.RLock()
        self._closed = False
        self.reset_summary()

    @property
    def plan(self) -> Plan:
        """Where everything lives."""
        return self.prepared.plan

    def infer(self, request: Request) -> Completion:
        """Run one request to its end.  Raises RequestError, or what failed the computation."""
        return self.infer_batch([request])[0]

    def infer_batch(self, requests: Many[Request]) -> list[Completion]:
        """Run requests together; results in their order.  The first error is raised at the end."""
        sequences = [self._submit(request) for request in requests]
        events: list[list[TokenEvent]] = [[] for _ in sequences]
        try:
            for sequence, own in zip(sequences, events, strict=True):
                own.extend(self._drive(sequence))
        finally:
            for sequence in sequences:
                self._cancel(sequence)
        return [_completion(s, own) for s, own in zip(sequences, events, strict=True)]

    def stream(self, request: Request) -> Generator[TokenEvent, None, None]:
        """Tokens of one request as they come.  Closing the iterator cancels the request."""
        sequence = self._submit(request)  # at once, so that a bad request fails at the call

        def events() -> Generator[TokenEvent, None, None]:
            try:
                yield from self._drive(sequence)
            finally:
                self._cancel(sequence)

        return events()

    def logits(
        self, tokens: Many[int], rows: Many[int], *, prefill: int | None = None
    ) -> torch.Tensor:
        """Teacher forcing: logits f32 [rows, vocab] that follow `tokens[: row + 1]` for each row.

        `rows` must ascend.  The first `prefill` tokens (None: all) go through in prefill chunks,
        the others one by one, as in decoding.  Runs at once, beside no other request.
        """
        if not tokens:
            raise EmptyPromptError("the prompt is empty; logits need at least one token")
        chunk, end = self.plan.prefill_chunk, len(tokens) if prefill is None else prefill
        starts = [*range(0, end, chunk), *range(end, len(tokens)), len(tokens)]
        parts = []
        with self._lock:
            self._check_open()
            kv = self._memory.kv.open(len(tokens))
            try:
                for start, stop in pairwise(starts):
                    own = [row - start for row in rows if start <= row < stop]
                    run = Run(kv, start, 0, stop - start, len(tokens))
                    parts.append(self._run_rows(run, tokens[start:stop], own))
            finally:
                self._memory.kv.close(kv)
        return torch.cat(parts)

    def summary(self) -> RunSummary:
        """What everything since the load, or the last `reset_summary`, has cost."""
        blocks, homes = self.prepared.demand.blocks, self.plan.homes
        by_home = {
            tier: sum(b.slot_bytes for b in blocks if homes[b.id] is tier)
            for tier in (Tier.HOST, Tier.DISK)
        }
        return RunSummary(
            prompt=self._prompt,
            generation=self._generation,
            machine=self.prepared.machine,
            published_bytes=self.prepared.published_bytes,
            budget_bytes=self.plan.budgets[Tier.HOST],
            used_bytes=self._memory.ledger.by_purpose(Tier.HOST),
            resident_bytes=by_home[Tier.HOST],
            streamed_bytes=by_home[Tier.DISK],
            peak_rss_bytes=peak_resident_bytes(),
        )

    def reset_summary(self) -> None:
        """Start counting anew."""
        self._prompt, self._generation = Phase(), Phase()

    def close(self) -> None:
        """Free all memory.  Requests that still run are cancelled by their callers' next fetch."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self, request: Request) -> Sequence:
        sequence = self._sequence(request)
        with self._lock:
            self._check_open()
            self._scheduler.add(sequence)
        return sequence

    def _sequence(self, request: Request) -> Sequence:
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        tokens = self._prompt_tokens(request)
        longest = self.prepared.model.spec.max_context
        if request.context_size is not None and not 0 < request.context_size <= longest:
            raise ContextLengthError(
                f"context_size {request.context_size} was asked for; this model was made for "
                f"1 to {longest}"
            )
        limit = request.context_size or longest
        if len(tokens) + request.max_new_tokens > limit:
            raise ContextLengthError(
                f"{len(tokens)} prompt tokens and {request.max_new_tokens} new ones are more than "
                f"the context of {limit}; shorten the prompt or lower max_new_tokens"
            )
        return Sequence(
            request=request,
            tokens=tokens,
            prompt_tokens=len(tokens),
            sampler=SamplerState(request.sampling, tokens),
            text=self.tokenizer.stream(),
            stops=StopStrings(request.stop),
            eos_ids=self.tokenizer.eos_ids,
        )

    def _prompt_tokens(self, request: Request) -> list[int]:
        if not request.input:
            raise EmptyPromptError("the prompt is empty; give text, messages or token ids")
        if isinstance(request.input, str):
            return self.tokenizer.encode(request.input)
        if isinstance(request.input[0], dict):
            return self.tokenizer.chat_prompt(request.input)
        vocabulary = self.prepared.model.spec.vocab_size
        for token in request.input:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise RequestError(f"token id {token!r} is not in 0..{vocabulary - 1}")
        return list(request.input)

    def _drive(self, sequence: Sequence) -> Iterator[TokenEvent]:
        """Events of `sequence`, running steps whenever none is there."""
        while True:
            while sequence.events:
                yield sequence.events.popleft()
            if sequence.error is not None:
                raise sequence.error
            if sequence.finished:
                return
            with self._lock:
                if not sequence.events and not sequence.finished:
                    self._check_open()
                    self._advance()

    def _advance(self) -> None:
        """One step for everyone."""
        scheduled = self._scheduler.next_step()
        assert scheduled is not None, "a request waits and nothing can run"
        try:
            logits = self._run(scheduled)
        except HMTError as error:
            for sequence, _ in scheduled.advanced:
                sequence.fail(error)
        else:
            for sequence, count in scheduled.advanced:
                sequence.computed += count
            for sequence, row in zip(scheduled.sampled, logits, strict=True):
                try:
                    sequence.accept(row)
                except HMTError as error:
                    sequence.fail(error)
        for sequence, _ in scheduled.advanced:
            if sequence.finished:
                self._scheduler.retire(sequence)

    def _run(self, scheduled: Scheduled) -> torch.Tensor:
        phase = self._prompt if scheduled.prompt_tokens else self._generation
        with _Measure(phase, self._memory, self.tracer):
            logits = self._executor.run(scheduled.step)
        generated = len(scheduled.step.token_ids) - scheduled.prompt_tokens
        phase.tokens += scheduled.prompt_tokens or generated
        return logits

    def _run_rows(self, run: Run, tokens: Many[int], rows: list[int]) -> torch.Tensor:
        step = Step(
            torch.tensor(tokens),
            torch.arange(run.start, run.context),
            (run,),
            torch.tensor(rows, dtype=torch.int64),
        )
        with _Measure(self._prompt, self._memory, self.tracer):
            logits = self._executor.run(step)
        self._prompt.tokens += len(tokens)
        return logits

    def _cancel(self, sequence: Sequence) -> None:
        with self._lock:
            if not self._closed:
                self._scheduler.cancel(sequence)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the model has been closed; load it again")


class _Measure:
    """Adds one step's time and traffic to a phase."""

    def __init__(self, phase: Phase, memory: Memory, tracer: Tracer) -> None:
        self._phase = phase
        self._counters = memory.weights.counters
        self._tracer = tracer

    def __enter__(self) -> None:
        counters = self._counters
        self._before = (
            counters.hits,
            counters.pending,
            counters.misses,
            counters.waited_s,
            counters.host_bytes,
            self._tracer.total("read", "disk").nbytes,
            self._tracer.total("convert", "host").seconds,
        )
        self._begin = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.perf_counter()
        hits, pending, misses, waited_s, host_bytes, disk_bytes, converted_s = self._before
        phase, counters = self._phase, self._counters
        phase.steps += 1
        phase.seconds += end - self._begin
        phase.hits += counters.hits - hits
        phase.pending += counters.pending - pending
        phase.misses += counters.misses - misses
        phase.waited_s += counters.waited_s - waited_s
        phase.host_bytes += counters.host_bytes - host_bytes
        phase.disk_bytes += self._tracer.total("read", "disk").nbytes - disk_bytes
        phase.converted_s += self._tracer.total("convert", "host").seconds - converted_s
        self._tracer.record("step", "host", 0, self._begin, end)


def _executor(prepared: Prepared, config: EngineConfig, memory: Memory) -> Executor:
    if config.executor == "plain":
        return PlainExecutor(prepared.model, memory.weights, memory.kv)
    return OverlappedExecutor(prepared.model, memory.weights, memory.kv, prepared.plan)


def _completion(sequence: Sequence, events: list[TokenEvent]) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        text="".join(event.text for event in events),
        token_ids=tuple(event.token_id for event in events),
        finish_reason=sequence.finish_reason,
        prompt_tokens=sequence.prompt_tokens,
        logprobs=tuple(event.logprob for event in events if event.logprob is not None),
    )
