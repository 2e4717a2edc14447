"""Decoding steps that a device captures once and then replays.

A step of one token launches ten kernels a layer, and to launch one takes the CPU as long as a small
one takes the device.  Captured, a step is a list of segments: device graphs, each one launch, and
between them waits for weights that are copied in every step, and calls of the CPU, which computes
feed-forward networks in host memory and attends to pages there.  Where all is on the device there
is one segment.  Experts that are not on the device it asks the CPU for while the graph runs.

A capture ends by choosing each run's likeliest token and begins by looking tokens up.  So the next
step of a single graph can begin before the CPU has seen this one's logits, on the guess that the
same runs go on with those tokens.  Where that was wrong (another token was drawn, a run has ended
or one has come), its result is dropped: what it wrote to the KV cache lies behind the runs, where
the next step writes, and recurrent state it has changed in copies.

A step that verifies draft tokens is captured by how many tokens and sequences it has.  Whose tokens
are draft tokens is told in the same tensors as where they lie: to kernels each token is a run of
its own, at its own position.  Such a step begins no next one: where that goes on depends on how
many draft tokens are right.
"""

import time
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from hmt.base.log import warn_once
from hmt.contracts.model import Model
from hmt.contracts.sharding import Collective
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.captures import (
    AsyncNextStep,
    CapturedGraph,
    GraphKey,
    Result,
    next_runs,
    room_of,
    token_runs,
)
from hmt.engine.execution.graphs.guesses import NextStepGuesses
from hmt.engine.execution.graphs.segmented_weights import HostFfnBuffers, SegmentLeases
from hmt.engine.outputs.prompt_outputs import HiddenObserver, PromptOutputSource
from hmt.kernels import graph_ops, ops
from hmt.kernels.cpu.threads import awake_workers
from hmt.kernels.host_experts import HostExpertChannel, HostExpertTimes
from hmt.kernels.ops import LogitStats
from hmt.kvcache import GraphKVCache, PagedKV
from hmt.memory.device import (
    CapturedStep,
    Device,
    Event,
    InlineRecorder,
    SegmentRecorder,
)
from hmt.weights import DeviceWeights, WeightsView

_SHORTEST = 1024  # positions; kernels are launched for the longest context of a capture
_MAX_GRAPHS = 16


class GraphRunner:
    """Computes logits of steps of one token per run, and draft tokens behind it.  For one thread.

    surveys   what is known of each row of the last logits
    has_captured   whether the last step was captured, and took longer for it
    failure   why no step is captured any more; "" while they are
    given     hidden states that its layers begin with in the next step; None: those of its tokens
    graphs    captures, by whether some of a step's pages are in host memory or on disk
    """

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        kv: PagedKV | GraphKVCache,
        device: Device,
        channel: HostExpertChannel | None = None,
        *,
        head: bool = True,
        host_ffn: bool = False,
        exact_batches: bool = False,
        layers: range | None = None,
        collective: Collective | None = None,
    ) -> None:
        """All else that layers compute with is on `device`.

        kv        where some pages may not be on the device, a GraphKVCache
        channel   where the device asks the CPU for experts that it does not have
        head      whether it is on the device, too, and not the CPU's
        host_ffn  whether some blocks are copied in every step, and feed-forward networks the CPU's
        exact_batches   whether kernels give a token the same bits however many are in a step
        layers    the row of them that is on this of several devices; None: all are
        collective   of the ranks that compute each layer together; None: this process does alone
        """
        self._model = model
        self._collective = collective
        self._weights = weights
        self._kv = kv
        self._tiers = kv if isinstance(kv, GraphKVCache) else None
        self._device = device
        self._channel = channel
        self._head = head
        self.host_ffn = host_ffn
        self._layers = range(model.spec.layers) if layers is None else layers
        self.given: torch.Tensor | None = None
        self._looks_up = weights.looks_up_tokens and not self._layers.start
        # Whether a step is one graph, and the copy stream idle meanwhile.  Else the next step's
        # weights or pages are copied beside it, and its tokens would wait for the CPU's part.
        self._is_single = not host_ffn and self._tiers is None
        self._states = kv.states
        self._runs_ahead = self._is_single and self._looks_up and head
        if collective is not None:  # a step that it begins alone would wait for the others
            self._runs_ahead &= collective.announce is not None and self._states is None
        self.graphs: dict[bool, OrderedDict[GraphKey, CapturedGraph]]
        self.graphs = {offloaded: OrderedDict() for offloaded in (False, True)}
        self._offloaded = False  # of the step that is computed now
        self.failure = ""
        self._async_step: AsyncNextStep | None = None
        self.surveys: tuple[LogitStats, ...] = ()
        self._guesses = NextStepGuesses()
        self._keeps_runs = graph_ops.keeps_runs(device.where)
        self.has_captured = False
        self._exact_batches = exact_batches
        self.served = HostExpertTimes(0, 0.0, 0.0)
        self._observer: HiddenObserver | None = None
        self.async_steps = self._guesses.counters

    def __call__(self, step: Step, viewer: PromptOutputSource | None = None) -> torch.Tensor | None:
        """Logits [tokens, vocab] in host memory, valid until the next call; None for other steps.

        The tensors of `step` are in host memory.  `viewer` is shown hidden states where all rows
        are pooled.
        """
        guess, self._async_step = self._async_step, None
        self.has_captured = False
        self._guesses.learn(step)
        shown = viewer.layers if viewer is not None and len(step.pooled_rows) else None
        if guess is not None and self._is_confirmed(guess, step, shown):
            captured, result = guess.captured, guess.result
        else:
            while self._channel is not None and self._channel.pending:
                self._end_answers()  # of a step that was begun in vain
            found = self._ready(step, shown)
            if found is None:
                return None
            captured, result = found, self._start(found)
        begun = self._begin_next(captured) if self._may_run_ahead(captured, step) else None
        self._end_answers()  # sleeps, and leaves this core to the CPU's experts
        result.arrived.wait()
        if self._channel is not None:
            self._channel.learn()
        logits, surveys = result.left, result.logit_stats
        if viewer is not None and shown is not None:
            result.show(viewer, lambda left: self._model.normed(left, self._weights))
        if self._observer is not None:
            self._observer.see(step, logits if result.last is None else result.last, stays=False)
        if surveys is None:
            logits = self._model.head(logits, self._weights)
            surveys = graph_ops.logit_stats_of(logits)
        self.surveys = graph_ops.logit_stats_list(surveys)
        if not (captured.sequences or captured.key.inputs):
            best = [one.best for one in self.surveys]
            self._guesses.likeliest = next_runs(step.segments), best
        if begun is not None:
            axes = None if step.axes is None else step.axes + 1
            self._async_step = AsyncNextStep(captured, *self._guesses.likeliest, axes, begun)
        if self._tiers is not None:
            self._tiers.ended()
        return logits

    def has_begun(self, step: Step) -> bool:
        """Whether it computes `step`, of which no hidden state is shown, already."""
        guess = self._async_step
        return guess is not None and not len(step.pooled_rows) and guess.is_of(step, None)

    def pass_on(self, step: Step) -> torch.Tensor | None:
        """Hidden states behind its layers, on the device's queue; None for steps as in a call.

        Valid until the next step.
        """
        captured = self._ready(step, None)
        if captured is None:
            return None
        left = self._put_on_queue(captured)
        if self._channel is not None:
            self._end_answers()
            self._channel.learn()
        return left

    def _ready(self, step: Step, shown: tuple[int, ...] | None) -> CapturedGraph | None:
        """A capture with the step's tokens; None for steps that are not captured."""
        if not self.takes(step):
            return None
        if self._tiers is not None:
            self._offloaded = self._tiers.begin(step)
        if self._states is not None:
            self._states.begin(step)
        graphs = self.graphs[self._offloaded]
        longest = max(run.context for run in step.segments)
        context = max(_SHORTEST, 1 << (longest - 1).bit_length())
        runs = self._segments(step)
        seen = step if runs is step.segments else replace(step, segments=runs)
        width = 0 if step.inputs is None else step.inputs.shape[1]
        tokens, sequences = len(step.token_ids), len(step.segments)
        angles, axes = self._model.angles(seen), step.axes is not None
        key = GraphKey(tokens, sequences, context, angles, width, shown, axes)
        captured = graphs.get(key)
        if captured is None:
            captured = graphs[key] = self._open(key, step)
            if len(graphs) > _MAX_GRAPHS:
                graphs.popitem(last=False)
        graphs.move_to_end(key)
        self._send(captured, step)
        if captured.recorded is None:
            if not self._capture(captured, step):
                return None
            self._send(captured, step)  # computing has changed what was sent
        return captured

    def takes(self, step: Step) -> bool:
        """Whether it computes such steps."""
        tokens = len(step.token_ids)
        decodes = all(run.length == 1 + run.drafts for run in step.segments)
        if not self.works or not decodes or len(step.logit_rows) != tokens:
            return False
        if len(step.scored_rows) or len(step.pooled_rows) not in (0, tokens):
            return False
        if self._collective is not None and len(step.pooled_rows):
            return False  # the first rank alone would show their hidden states
        if self._states is not None and self._states.lags(step.segments):
            return False
        return self._channel is None or tokens <= self._channel.tokens

    def watch(self, observer: HiddenObserver | None) -> None:
        """Let `observer` see hidden states of each step; what was captured is captured anew."""
        self._observer, self._async_step = observer, None
        for graphs in self.graphs.values():
            graphs.clear()

    @property
    def works(self) -> bool:
        """Whether steps are captured."""
        return not self.failure

    def verifies(self, sequences: int) -> bool:
        """Whether steps of so many sequences take draft tokens, and change no answer by them.

        Tokens of one sequence can be computed each as if it were alone.  A batch's are computed by
        other kernels the more they are, unless `exact_batches`.
        """
        several = self._exact_batches or not self._keeps_runs
        return self.works and (sequences == 1 or several)

    def replayed_s(self, times: int) -> float:
        """Seconds of the device for the step it computed last, as one of many in a row.

        Between the runs' steps; each of so many `times` writes one position further behind them,
        where they must have room, and reads recurrent state, which stays as it is.
        0 where nothing is captured, or the CPU has a part in it.
        """
        captured = next(reversed(self.graphs[self._offloaded].values()), None)
        if captured is None or captured.recorded is None or self._channel is not None:
            return 0.0
        if self._collective is not None:
            return 0.0  # would wait for ranks that compute no step
        if captured.sequences:
            return 0.0  # others come next
        if captured.runs is None and self._async_step is None:
            self._advance(captured)
        self._async_step = None  # the next step sends its own tensors
        self._hold_states(captured, advances=False)
        self._device.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            self._replay(captured)
        self._device.synchronize()
        return (time.perf_counter() - begin) / times

    # Guesses

    def _is_confirmed(
        self, async_step: AsyncNextStep, step: Step, shown: tuple[int, ...] | None
    ) -> bool:
        right = async_step.is_of(step, shown)
        right = right and (self._states is None or self._states.confirm(step))
        self._guesses.ended(right=right)
        return right

    def _may_run_ahead(self, captured: CapturedGraph, step: Step) -> bool:
        if not self._guesses.is_worth_it(asks_cpu=self._channel is not None):
            return False
        if (
            captured.sequences
            or captured.key.inputs
            or not self._runs_ahead
            or not all(
                run.context < min(room_of(run), room, captured.key.context)
                for run, room in zip(step.segments, captured.rooms, strict=True)
            )
        ):
            return False
        return self._states is None or self._states.can_run_ahead(step.segments)

    def _begin_next(self, captured: CapturedGraph) -> Result:
        self.async_steps.begun += 1
        if captured.runs is None:
            self._advance(captured)
        if self._states is not None:
            self._states.run_ahead(captured.step, captured.state_runs)
        if self._collective is not None and self._collective.announce is not None:
            self._collective.announce()
            self._collective.share(captured.step.token_ids)
        return self._start(captured)

    def _advance(self, captured: CapturedGraph) -> None:
        """Let the step be the next one, where kernels read its runs: on a fake device."""
        captured.step = replace(captured.step, segments=next_runs(captured.step.segments))

    # Captures

    def _start(self, captured: CapturedGraph) -> Result:
        """Put the step on the device's queue."""
        left = self._put_on_queue(captured)
        buffers = captured.next_buffers(left)
        kept, host = buffers.kept, buffers.left
        if self._is_single:
            # 32 rows take 0.3 ms to host memory, which the next step need not wait for.
            kept.copy_(left, non_blocking=True)
            arrived: Event = self._device.copy(host, kept, self._device.record_event())
        else:
            host.copy_(left, non_blocking=True)
            arrived = self._device.record_event()
        return Result(host, buffers.logit_stats, buffers.shown, buffers.last, arrived)

    def _put_on_queue(self, captured: CapturedGraph) -> torch.Tensor:
        if self._channel is None:
            return self._replay(captured)
        self._channel.begin(len(captured.step.token_ids))
        left = self._replay(captured)
        self._channel.serve(len(left))
        return left

    def _end_answers(self) -> None:
        """Wait until the CPU has answered the first step whose answers were not waited for."""
        if self._channel is not None:
            served = self._channel.end()
            self.served = self.served + served
            self._weights.count(served.experts * self._weights.moe_backends.nbytes)

    def _segments(self, step: Step) -> tuple[Segment, ...]:
        """The runs of a step as layers see them: of one token each, where kernels read tensors."""
        if not self._keeps_runs or len(step.token_ids) == len(step.segments):
            return step.segments
        return token_runs(step.segments)

    def _open(self, key: GraphKey, step: Step) -> CapturedGraph:
        where, hidden, inputs, axes = self._device.where, None, None, None
        begin = None if self._looks_up else self._begun(step)
        with torch.inference_mode(False):
            if begin is not None:
                hidden = torch.empty(begin.shape, dtype=begin.dtype, device=where)
            if key.inputs:
                inputs = torch.empty(key.tokens, key.inputs, device=where)
            if key.axes:
                axes = torch.zeros(3, key.tokens, dtype=torch.int64, device=where)
            ids, positions = (
                torch.zeros(key.tokens, dtype=torch.int64, device=where) for _ in "ab"
            )
        rows = torch.arange(key.tokens, device=where)
        step = Step(ids, positions, (), rows, inputs=inputs, axes=axes)
        most = key.context if self._tiers is None else min(key.context, self._tiers.device_tokens)
        runs, state_runs = graph_ops.fixed_runs(where, key.tokens, most, key.verified), None
        if self._states is not None:
            state_runs = graph_ops.fixed_state_runs(where, key.tokens)
        in_parts = self.host_ffn or self._offloaded
        return CapturedGraph(key, hidden, step, runs, in_parts, state_runs)

    def _begun(self, step: Step) -> torch.Tensor:
        return self._model.embed(step, self._weights) if self.given is None else self.given

    def _send(self, captured: CapturedGraph, step: Step) -> None:
        if captured.hidden is not None:
            captured.hidden.copy_(self._begun(step), non_blocking=True)
        own = captured.step
        own.token_ids.copy_(step.token_ids, non_blocking=True)
        own.positions.copy_(step.positions, non_blocking=True)
        if own.inputs is not None and step.inputs is not None:
            own.inputs.copy_(step.inputs, non_blocking=True)
        if own.axes is not None and step.axes is not None:
            own.axes.copy_(step.axes, non_blocking=True)
        captured.step = replace(own, segments=self._segments(step))
        captured.rooms = [room_of(run) for run in step.segments]
        if captured.runs is not None:
            given = self._kv.attention_metadata(step)
            graph_ops.fill_runs(captured.runs, ops.by_token(given) if captured.sequences else given)
            self._kv.hold(captured.step, captured.runs)
        elif self._tiers is not None:
            self._tiers.hold(captured.step, None)
        self._hold_states(captured)

    def _hold_states(self, captured: CapturedGraph, *, advances: bool = True) -> None:
        if self._states is not None:
            self._states.hold(captured.step, captured.state_runs, advances=advances)

    def _replay(self, captured: CapturedGraph) -> torch.Tensor:
        assert captured.recorded is not None
        with awake_workers() if captured.has_host_part else nullcontext():
            return captured.recorded.replay()

    def _record(self, captured: CapturedGraph) -> CapturedStep:
        """Turn the step into segments."""
        if not captured.has_host_part:
            return self._device.capture(lambda: self._compute(captured, self._weights, None))
        if not self.host_ffn:
            return self._device.capture_segments(
                lambda recorder: self._compute(captured, self._weights, recorder)
            )
        shape = len(captured.step.token_ids), self._model.spec.hidden_size
        buffers = HostFfnBuffers(self._device, self._weights, shape, self._model.dtype)

        def compute(recorder: SegmentRecorder) -> torch.Tensor:
            leases = SegmentLeases(self._weights, recorder, buffers)
            weights = WeightsView(self._weights, other_lease=leases.lease)
            return self._compute(captured, weights, recorder)

        return self._device.capture_segments(compute)

    def _compute(
        self, captured: CapturedGraph, weights: Weights, recorder: SegmentRecorder | None
    ) -> torch.Tensor:
        """The step's logits; afterwards its tensors are those of the likeliest next step.

        Hidden states where the head is the CPU's.  `recorder` is told what the CPU has a part in.
        """
        # A lone sequence has the tokens that it has without draft tokens.  Where several are in a
        # step, `verifies` has asked whether kernels give them anyway.
        alone = captured.sequences == 1
        with (
            self._attention_recorded(recorder),
            graph_ops.single_tokens(self._device.where) if alone else nullcontext(),
        ):
            return self._compute_layers(captured, weights)

    def _attention_recorded(self, recorder: SegmentRecorder | None) -> AbstractContextManager[None]:
        if self._tiers is None or recorder is None or not self._offloaded:
            return nullcontext()
        return self._tiers.recording(recorder)

    def _compute_layers(self, captured: CapturedGraph, weights: Weights) -> torch.Tensor:
        step, states = captured.step, captured.hidden
        if states is None:
            states = self._model.embed(step, weights)
        shown = captured.key.shown or ()
        for index in self._layers:
            if index in shown:
                captured.show(states, index)
            states = self._model.layer(index, states, step, weights, self._kv)
        if self._channel is not None:
            self._channel.note()
        if self._layers.stop in shown:
            captured.show(states, self._layers.stop)
        if not self._head:
            return states
        if self._observer is not None:
            captured.keep_last(states)
        if captured.key.shown == ():
            captured.show(self._model.normed(states, weights))
        logits = self._model.head(states, weights)
        captured.logit_stats = graph_ops.logit_stats_and_next(
            logits, step.token_ids, step.positions, captured.runs, step.axes
        )
        return logits

    def _capture(self, captured: CapturedGraph, step: Step) -> bool:
        self.has_captured = True
        if self._channel is not None:
            self._channel.is_open = True  # no kernel waits yet: all has been answered
        try:
            # Compiles kernels, and makes what they keep.
            self._hold_states(captured, advances=False)
            with nullcontext() if self._collective is None else self._collective.rehearsal():
                self._compute(captured, self._weights, InlineRecorder())
            self._send(captured, step)  # what was made for a step belongs into the capture
            captured.recorded = self._record(captured)
        except RuntimeError as error:
            self.failure = str(error)
            warn_once("capture", f"steps cannot be captured ({error}): decoding will be slower")
        finally:
            if self._channel is not None:
                self._channel.is_open = False
        return self.works
