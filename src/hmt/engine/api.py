"""The engine's API: requests go to the engine's thread, and tokens come back."""

import atexit
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from hmt.base.errors import ClosedError, RequestError
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.request import Completion, Request, Sampling
from hmt.engine import run_history
from hmt.engine.config import EngineConfig
from hmt.engine.engine_core import EngineCore
from hmt.engine.engine_thread import EngineThread
from hmt.engine.input_processor import InputProcessor
from hmt.engine.loading.on_thread import allocate_draft, allocate_on
from hmt.engine.loading.prepared import Prepared, PreparedDraft
from hmt.engine.outputs.output_processor import OutputProcessor, TokenListener
from hmt.engine.run_summary import RankAccount, RunSummary
from hmt.engine.scheduling.sequence import Load, SequenceState
from hmt.engine.snapshot import EngineSnapshot, SnapshotReader
from hmt.engine.streams import RequestHandle, StreamEvent, TokenStream, completions, nth
from hmt.engine.timeline import Timeline, tracer_for
from hmt.memory import Ledger, peak_resident_bytes
from hmt.memory.device import Device


class LoadedModel:
    """A model that answers requests.  Thread-safe: callers' requests run in common steps.

    adapters   low-rank adapters that requests may name
    """

    def __init__(
        self,
        prepared: Prepared,
        config: EngineConfig,
        ledger: Ledger,
        progress: Callable[[int, int], None] | None = None,
        devices: Many[Device] = (),
        draft: PreparedDraft | None = None,
    ) -> None:
        """`draft` is a small model that drafts tokens, if one does."""
        self.prepared = prepared
        self.max_batch = config.max_batch
        self.tokenizer = prepared.source.tokenizer()
        with ExitStack() as stack:
            self._timeline: Timeline | None = None
            if config.trace is not None:
                self._timeline = stack.enter_context(closing(Timeline(config.trace)))
            self.tracer = tracer_for(self._timeline)
            self._loop = EngineThread()
            memory = allocate_on(
                self._loop, prepared, config, ledger, self.tracer, progress, devices
            )
            self._snapshot_reader = SnapshotReader(prepared, memory.weights)
            self._predictor = run_history.predictor_of(
                prepared.source.path.name, prepared.demand, prepared.plan, prepared.machine
            )
            if draft is not None:
                allocate_draft(self._loop, draft, ledger, self.tracer, memory, devices)
            self._core = self._loop.call(lambda: EngineCore(prepared, config, memory, self.tracer))
            capacity_tokens = self._core.load.capacity_tokens
            self.adapters = memory.adapters
            self._input = InputProcessor(
                prepared, self.tokenizer, capacity_tokens, memory.adapters, memory.images
            )
            stack.pop_all()
        self._loop.run_steps(self._core.advance, self._core.wait_s)
        self.closed = False
        _open_models.add(self)

    @property
    def plan(self) -> Plan:
        """Where everything lives."""
        return self.prepared.plan

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let requests name the low-rank adapter in `path`: a folder of peft, or a GGUF file.

        Its file is read when a request needs it and it is not in memory; it must not change.
        Raises MissingFileError, HeaderError, ShapeError, or AdapterError for what is no adapter of
        this model, DiskReadError, and BudgetError where it can never fit: see `adapter_memory` of
        EngineConfig.
        """
        self.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.  Raises RequestError where there is none, AdapterError while used."""
        self.adapters.unload(name)

    def use_adapter(self, name: str) -> None:
        """Compute requests that name no adapter with this one, and teacher forcing; "": with none.

        Raises RequestError where there is none of this name.
        """
        self.adapters.use(name)

    @property
    def ranks(self) -> tuple[RankAccount, ...]:
        """Other processes that compute the model with this one, as they are now.  Never waits."""
        ranks = self._core.memory.ranks
        return () if ranks is None else ranks.accounts

    def check_images(self, count: int) -> None:
        """Raise RequestError where the model can see none of `count` images."""
        self._input.check_images(count)

    def check_videos(self, count: int) -> None:
        """Raise RequestError where the model can take none of `count` videos."""
        self._input.check_videos(count)

    @property
    def images_refused(self) -> str:
        """Why the model sees no images; empty where it does."""
        return self._input.images_refused

    def infer(self, request: Request) -> Completion:
        """Run one request to its end.  Raises RequestError, or what failed the computation."""
        return self.infer_batch([request])[0]

    def infer_batch(self, requests: Many[Request]) -> list[Completion]:
        """Run requests together; results in their order.

        Raises the error of the first request that fails, and cancels the others.
        """
        return completions(self.stream_batch(requests))

    def stream(self, request: Request) -> TokenStream:
        """Tokens of one request as they come.  A bad request fails here, not at the first token."""
        return self.stream_batch([request])[0]

    def stream_batch(self, requests: Many[Request]) -> list[TokenStream]:
        """Tokens of requests that begin in one step, as they come; a stream for each, in order."""
        return self._submit(requests)

    def infer_choices(self, request: Request, count: int) -> list[Completion]:
        """`count` answers to one request, as `stream_choices` gives them.

        Raises what `infer_batch` raises.
        """
        return completions(self.stream_choices(request, count))

    def stream_choices(self, request: Request, count: int) -> list[TokenStream]:
        """`count` answers to one request: its prompt is computed once and shared.

        With a seed, each answer has its own seed: the request's, that plus 1, and so on.  Answers
        are those of separate requests.  Raises RequestError.
        """
        if type(count) is not int or count < 1:
            raise RequestError(f"{count!r} answers were asked for; ask for one or more")
        return self._submit([nth(request, number) for number in range(count)], shared=True)

    def begin(self, request: Request, listeners: Many[TokenListener]) -> list[RequestHandle]:
        """Queue as many answers to one request as there are listeners, and return at once.

        Each listener's `put` gets its answer's tokens, the last with a finish reason; or the error
        that ended it; or None when it was cancelled.  It is called on the engine's thread, and must
        neither wait nor raise.  Answers are those of `stream_choices`.  Raises RequestError for a
        request that can never run.
        """
        requests = [nth(request, number) for number in range(len(listeners))]
        processors = self._processors(requests, listeners, shared=True)
        self._loop.post(lambda: self._core.add(processors))
        return [RequestHandle(processor.state, self._cancel) for processor in processors]

    def beam_search(
        self, request: Request, beams: int, *, length_penalty: float = 1.0
    ) -> list[Completion]:
        """The best answers that a search with so many beams finds, as many, best first.

        Answers are ranked by `score`: see Completion.  Beams share what they have in common; steps
        of other requests run between theirs.  Raises RequestError for a request that samples or has
        stop strings, or more beams than max_batch; BudgetError where they do not fit now.
        """
        most, asked = self.max_batch, self._input.process(request, SimpleQueue())
        sequence = asked.state
        if type(beams) is not int or not 1 <= beams <= most:
            raise RequestError(f"{beams!r} beams were asked for; max_batch allows 1 to {most}")
        if request.sampling != Sampling() or asked.stops.any or request.min_tokens:
            raise RequestError(
                "beams take the likeliest: leave sampling and stop strings out, and min_tokens"
            )
        if request.images or request.videos:
            raise RequestError("a beam search reads text only: leave images and videos out")
        if sequence.has_prompt_outputs:
            raise RequestError(
                "a beam search tells nothing of the prompt: ask for that with a request of its own"
            )
        search = self._loop.call(
            lambda: self._core.search(
                sequence.tokens,
                beams=beams,
                new_tokens=sequence.max_total_tokens - sequence.prompt_tokens,
                eos_ids=asked.eos_ids,
                length_penalty=length_penalty,
                adapter=0 if sequence.adapter is None else sequence.adapter.number,
            )
        )
        try:
            while self._loop.call(search.advance):
                pass
            return [
                found.completion(self.tokenizer, sequence.prompt_tokens, length_penalty)
                for found in search.results()
            ]
        finally:
            if not self.closed:
                self._loop.call(search.close)

    def logits(
        self,
        tokens: Many[int],
        rows: Many[int],
        *,
        prefill: int | None = None,
        adapter: str = "",
    ) -> torch.Tensor:
        """Teacher forcing: logits f32 [rows, vocab] that follow `tokens[: row + 1]` for each row.

        `rows` ascend.  The first `prefill` tokens (None: all) go through in prefill chunks, the
        others one by one, as in decoding.  `adapter` is that of a Request.  Other requests wait
        meanwhile.  Raises RequestError for tokens, rows or a prefill that cannot be, BudgetError
        where the KV does not fit.
        """
        end = len(tokens) if prefill is None else prefill
        self.prepared.check_head(needed=bool(rows))
        hold = self.adapters.hold(adapter)
        number = 0 if hold is None else hold.number
        return self._loop.call(lambda: self._core.logits(tokens, rows, end, number))

    def keys_and_values(
        self, tokens: Many[int], see: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Read `tokens`, then call `see(layer, key, value)` with each layer's keys and values.

        Both [tokens, heads, dim], in the cache's dtype, and on the model's own thread; of layers
        with a window only the last positions are kept.  Raises what `logits` raises, and `see`.
        """
        return self._loop.call(lambda: self._core.keys_and_values(tokens, see))

    def hidden_rows(self, tokens: Many[int]) -> "NDArray[np.float32]":
        """Read `tokens`, and return hidden states behind the last layer, before the final norm.

        Of each `hmt.engine.drift.EVERY` positions the last: f32 [rows, channels].  Raises what
        `logits` raises.
        """
        return self._loop.call(lambda: self._core.hidden_rows(tokens))

    def summary(self) -> RunSummary:
        """What everything since the load, or the last `reset_summary`, has cost."""
        # On the engine's thread: a step counts once its last token has been handed out.
        return self._summary() if self.closed else self._loop.call(self._summary)

    def begin_summary(self) -> "Future[RunSummary]":
        """The same without waiting for the step that runs.  Raises ClosedError once closed."""
        return self._loop.begin(self._summary)

    def begin_snapshot(self) -> "Future[EngineSnapshot]":
        """The summary, and where everything lies now, for a monitor.  As `begin_summary`."""
        return self._loop.begin(lambda: self._snapshot_reader.read(self._core, self._summary()))

    def replayed_s(self, times: int) -> float:
        """See GraphRunner; 0 where nothing is captured."""
        return self._loop.call(lambda: self._core.runner.replayed_s(times))

    @property
    def load(self) -> Load:
        """Who waits and runs, and what room there is, as of the last step.  Never waits."""
        return self._core.load

    def _summary(self) -> RunSummary:
        core, homes = self._core, self._snapshot_reader.home_bytes
        return RunSummary(
            replace(core.accounts.prompt),
            replace(core.accounts.generation),
            machine=self.prepared.machine,
            published_bytes=self.prepared.published_bytes,
            budget_bytes=self.plan.budgets[Tier.HOST]
            + (0 if core.memory.draft is None else core.memory.draft.host_bytes)
            + (0 if self.prepared.copies is None else self.prepared.copies.nbytes),
            used_bytes=core.memory.used_bytes(),
            resident_bytes=homes[Tier.HOST],
            streamed_bytes=homes[Tier.DISK],
            peak_rss_bytes=peak_resident_bytes(),
            expert_prefetch_gain=core.runner.expert_prefetch_gain,
            pools=core.memory.pool_stats(),
            notes=self._notes(),
            device=core.memory.device_account(self.plan),
            kv=core.memory.kv_account(),
            prefixes=core.memory.prefixes.counters() if core.memory.prefixes else None,
            predicted=self._predictor.decoding(core.accounts.decoded),
            speculation=core.speculator.account.copy(),
            drift=core.runner.drift,
            ranks=self.ranks,
        )

    def _notes(self) -> tuple[str, ...]:
        core, prepared = self._core, self.prepared
        told = prepared.demand.spec.remarks + prepared.model.notes()
        if core.memory.images is not None and core.memory.images.remark:
            told += (core.memory.images.remark,)
        return told + core.runner.notes + core.speculator.notes

    def reset_summary(self) -> None:
        """Start counting anew."""
        self._loop.call(self._core.reset_account)

    def close(self) -> None:
        """Free all memory.  Requests that still run end with Cancelled.  Does nothing twice."""
        first, self.closed = not self.closed, True
        self._loop.stop(self._core.close)
        if first and self.prepared.divided is None:  # predictions are of one process
            accounts, name = self._core.accounts, self.prepared.source.path.name
            run_history.keep(self._predictor, self.plan, name, accounts.decoded, accounts.prefilled)
        if self._timeline is not None:
            self._timeline.write(self.tracer.events())
            self._timeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self, requests: Many[Request], *, shared: bool = False) -> list[TokenStream]:
        """Queue all, or none where one can never run."""
        queues: list[SimpleQueue[StreamEvent]] = [SimpleQueue() for _ in requests]
        processors = self._processors(requests, queues, shared)
        streams = [
            TokenStream(processor.state, events, self._cancel)
            for processor, events in zip(processors, queues, strict=True)
        ]
        self._loop.call(lambda: self._core.add(processors))
        return streams

    def _processors(
        self, requests: Many[Request], listeners: Many[TokenListener], shared: bool
    ) -> list[OutputProcessor]:
        """One for each; if `shared`, all after the first wait for its prompt."""
        processors: list[OutputProcessor] = []
        for request, listener in zip(requests, listeners, strict=True):
            first = processors[0] if shared and processors else None
            processors.append(self._input.process(request, listener, first))
        for processor in processors:
            self._core.scheduler.check(processor.state)
        for processor in processors[1:] if shared else ():
            processor.state.prefix_leader = processors[0].state
        return processors

    @property
    def max_positions(self) -> int:
        """The longest that prompt and answer may be together."""
        return self._input.max_positions

    def _cancel(self, sequence: SequenceState) -> None:
        if not self.closed:
            try:
                self._loop.post(lambda: self._core.cancel(sequence))
            except ClosedError:
                return  # closed meanwhile, which has ended the sequence


# A disk worker that is still converting when the interpreter ends would be cut off inside torch,
# which aborts the process.
_open_models: "weakref.WeakSet[LoadedModel]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for model in list(_open_models):
        model.close()
