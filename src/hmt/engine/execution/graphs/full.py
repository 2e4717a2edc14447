"""Decoding steps that compute on the device, captured once and then replayed.

A step of one token launches ten kernels a layer, and to launch one takes the CPU as long as a small
one takes the device.  Captured, a step is one launch.  What the CPU has to add, experts that are
not on the device, it is asked for at a desk while the step runs.

A capture ends by choosing each run's likeliest token and begins by looking tokens up, so the next
step can begin before anybody has seen this one's logits.  It is begun on the guess that the same
runs go on with those tokens.  Where that was wrong (another token was drawn, a run has ended or one
has come), its result is dropped: what it wrote to the KV cache lies behind the runs, where the next
step writes.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from hmt.base.log import warn_once
from hmt.contracts.model import Model
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import Weights
from hmt.kernels import graph_ops, ops
from hmt.kernels.host_experts import HostExpertChannel, HostExpertTimes
from hmt.kernels.ops import LogitStats
from hmt.kvcache import GraphKVCache, PagedKV
from hmt.memory.device import Device, Event, host_buffer
from hmt.weights import DeviceWeights

_SHORTEST = 1024  # positions; kernels are launched for the longest context of a capture
_MAX_GRAPHS = 16
_MOST_SKIPPED = 64  # steps without a guess, where guesses are wrong

# Tokens, positions up to which runs may come, and what the model's angles depend on.
GraphKey = tuple[int, int, tuple[int, ...]]


@dataclass(slots=True)
class _Result:
    """What a replay leaves in host memory, from `arrived` on.

    left         logits, f32 [tokens, vocab], and
    logit_stats  f64 [3, tokens], what `captures.surveys` says of each token's; where the head is
                 the CPU's: hidden states [tokens, hidden_size], and None
    """

    left: torch.Tensor
    logit_stats: torch.Tensor | None
    arrived: Event


@dataclass(slots=True)
class CapturedGraph:
    """A capture for so many runs of one token.

    context      no run may be longer
    hidden       what the step begins with; None where the capture begins with its tokens
    step         of the tensors that kernels read; its runs are those of the step that is computed
                 now
    runs         where tokens lie, in tensors that stay where they are; None where kernels read
                 `step`
    logit_stats  of the logits that `replay` leaves; None where it leaves hidden states
    rooms        up to which position each of `runs` knows its pages
    results      two, by turns: of what it leaves on the device and in host memory, and of surveys
    """

    context: int
    hidden: torch.Tensor | None
    step: Step
    runs: ops.AttentionMetadata | None
    replay: Callable[[], torch.Tensor] | None = None
    logit_stats: torch.Tensor | None = None
    rooms: list[int] = field(default_factory=list)
    results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=list
    )


@dataclass(slots=True)
class _AsyncNextStep:
    """A step that has begun already."""

    captured: CapturedGraph
    runs: tuple[Segment, ...]
    result: _Result
    tokens: list[int]


@dataclass(slots=True)
class AsyncStepCounters:
    """Steps that were begun early, and those of them that came."""

    begun: int = 0
    right: int = 0


class GraphDecoding:
    """Computes logits of steps of one token per run.  For one thread.

    surveys   what is known of each row of the last logits
    """

    _copies_are_idle = True

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        kv: PagedKV | GraphKVCache,
        device: Device,
        channel: HostExpertChannel | None = None,
        *,
        head: bool = True,
    ) -> None:
        """All blocks of layers stay on `device`, and the keys and values are there.

        channel  where teams ask for what other experts there are
        head     whether it is on the device, too, and not the CPU's
        """
        self._model = model
        self._weights = weights
        self._kv = kv
        self._device = device
        self._channel = channel
        self._head = head
        self._captured: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()
        self._works = True
        self._looks_up = weights.looks_up_tokens
        self._async_step: _AsyncNextStep | None = None
        self.surveys: tuple[LogitStats, ...] = ()
        self._skip = self._skipped = 0
        self.served = HostExpertTimes(0, 0.0, 0.0)
        self.async_steps = AsyncStepCounters()

    def __call__(self, step: Step) -> torch.Tensor | None:
        """Logits [tokens, vocab] in host memory, valid until the next call; None for other steps.

        The tensors of `step` are in host memory.
        """
        guess, self._async_step = self._async_step, None
        if guess is not None and self._is_confirmed(guess, step):
            captured, result = guess.captured, guess.result
        else:
            found = self._ready(step)
            if found is None:
                return None
            captured, result = found, self._start(found)
        begun = self._begin_next(captured, step) if self._may_run_ahead(captured, step) else None
        result.arrived.wait()
        logits, surveys = result.left, result.logit_stats
        if surveys is None:
            logits = self._model.head(logits, self._weights)
            surveys = graph_ops.logit_stats_of(logits)
        self.surveys = graph_ops.logit_stats_list(surveys)
        if begun is not None:
            best = [one.best for one in self.surveys]
            self._async_step = _AsyncNextStep(captured, _next(step.segments), begun, best)
        return logits

    def _ready(self, step: Step) -> CapturedGraph | None:
        """A capture with the step's tokens; None for steps that are not captured."""
        if not self._takes(step):
            return None
        tokens = len(step.token_ids)
        longest = max(run.context for run in step.segments)
        context = max(_SHORTEST, 1 << (longest - 1).bit_length())
        key = tokens, context, self._model.angles(step)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._open(tokens, context)
            if len(self._captured) > _MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        self._send(captured, step)
        if captured.replay is None:
            if not self._capture(captured, step):
                return None
            self._send(captured, step)  # computing has changed what was sent
        return captured

    def _takes(self, step: Step) -> bool:
        """Whether it computes such steps."""
        tokens = len(step.token_ids)
        decodes = all(run.length == 1 for run in step.segments)
        if not self._works or not decodes or len(step.logit_rows) != tokens:
            return False
        if step.has_prompt_outputs:
            return False
        return self._channel is None or tokens <= self._channel.tokens

    def replayed_s(self, times: int) -> tuple[float, float]:
        """Seconds of the device for the step it computed last: as one of many in a row, and alone.

        Between the runs' steps; each of so many `times` writes one position further behind them,
        where they must have room.  0, 0 where nothing is captured, or the CPU has a part in it.
        """
        captured = next(reversed(self._captured.values()), None)
        if captured is None or captured.replay is None or self._channel is not None:
            return 0.0, 0.0
        self._async_step = None  # the next step sends its own tensors
        alone = math.inf
        for _ in range(times // 4):
            self._device.synchronize()
            begin = time.perf_counter()
            captured.replay()
            self._device.synchronize()
            alone = min(alone, time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(times - times // 4):
            captured.replay()
        self._device.synchronize()
        return (time.perf_counter() - begin) / (times - times // 4), alone

    # Guesses

    def _is_confirmed(self, async_step: _AsyncNextStep, step: Step) -> bool:
        right = (
            step.segments == async_step.runs
            and len(step.logit_rows) == len(async_step.tokens)
            and step.token_ids.tolist() == async_step.tokens
        )
        self.async_steps.right += right
        self._skipped = 0 if right else min(_MOST_SKIPPED, 2 * self._skipped + 1)
        self._skip = self._skipped
        return right

    def _may_run_ahead(self, captured: CapturedGraph, step: Step) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        # While the CPU answers at the desk, nobody is there to see that a guess was wrong.
        return (
            self._looks_up
            and self._head
            and self._channel is None
            and all(
                run.context < min(_room(run), room, captured.context)
                for run, room in zip(step.segments, captured.rooms, strict=True)
            )
        )

    def _begin_next(self, captured: CapturedGraph, step: Step) -> _Result:
        self.async_steps.begun += 1
        if captured.runs is None:  # a fake device: kernels read the step
            own = captured.step
            runs = _next(step.segments)
            captured.step = Step(own.token_ids, own.positions, runs, own.logit_rows)
        return self._start(captured)

    # Captures

    def _start(self, captured: CapturedGraph) -> _Result:
        """Put the step on the device's queue."""
        assert captured.replay is not None
        if self._channel is not None:
            self._channel.begin(len(captured.step.token_ids))
        left = captured.replay()
        if len(captured.results) < 2:
            with torch.inference_mode(False):  # a copy may end when all computing has
                kept = torch.empty(left.shape, dtype=left.dtype, device=left.device)
                found = None if captured.logit_stats is None else _beside(captured.logit_stats)
                captured.results.append((kept, _beside(left), found))
        else:
            captured.results.append(captured.results.pop(0))
        kept, host, surveys = captured.results[-1]
        if surveys is not None and captured.logit_stats is not None:
            surveys.copy_(captured.logit_stats, non_blocking=True)
        if self._copies_are_idle and self._channel is None:
            # 32 rows take 0.3 ms to host memory, which the next step need not wait for.
            kept.copy_(left, non_blocking=True)
            arrived: Event = self._device.copy(host, kept, self._device.record_event())
        else:
            host.copy_(left, non_blocking=True)
            arrived = self._device.record_event()
        if self._channel is not None:
            served = self._channel.serve(len(left))
            self.served = self.served + served
            self._weights.count(served.experts * self._weights.moe_backends.nbytes)
        return _Result(host, surveys, arrived)

    def _open(self, tokens: int, context: int) -> CapturedGraph:
        where, spec = self._device.where, self._model.spec
        hidden = None
        with torch.inference_mode(False):
            if not self._looks_up:
                dtype = self._model.dtype
                hidden = torch.empty(tokens, spec.hidden_size, dtype=dtype, device=where)
            ids, positions = (torch.zeros(tokens, dtype=torch.int64, device=where) for _ in "ab")
        step = Step(ids, positions, (), torch.arange(tokens, device=where))
        return CapturedGraph(context, hidden, step, self._fixed_runs(tokens, context))

    def _fixed_runs(self, tokens: int, context: int) -> ops.AttentionMetadata | None:
        return graph_ops.fixed_runs(self._device.where, tokens, context)

    def _send(self, captured: CapturedGraph, step: Step) -> None:
        if captured.hidden is not None:
            captured.hidden.copy_(self._model.embed(step, self._weights), non_blocking=True)
        own = captured.step
        own.token_ids.copy_(step.token_ids, non_blocking=True)
        own.positions.copy_(step.positions, non_blocking=True)
        captured.step = Step(own.token_ids, own.positions, step.segments, own.logit_rows)
        captured.rooms = [_room(run) for run in step.segments]
        if captured.runs is not None:
            graph_ops.fill_runs(captured.runs, self._kv.attention_metadata(step))
            self._kv.hold(captured.step, captured.runs)

    def _record(self, captured: CapturedGraph) -> Callable[[], torch.Tensor]:
        return self._device.capture(lambda: self._compute(captured, self._weights))

    def _compute(self, captured: CapturedGraph, weights: Weights) -> torch.Tensor:
        """The step's logits; afterwards its tensors are those of the likeliest next step.

        Hidden states where the head is the CPU's.
        """
        step, states = captured.step, captured.hidden
        if states is None:
            states = self._model.embed(step, weights)
        for index in range(self._model.spec.layers):
            states = self._model.layer(index, states, step, weights, self._kv)
        if self._channel is not None:
            self._channel.note()
        if not self._head:
            return states
        logits = self._model.head(states, weights)
        captured.logit_stats = graph_ops.logit_stats_and_next(
            logits, step.token_ids, step.positions, captured.runs
        )
        return logits

    def _capture(self, captured: CapturedGraph, step: Step) -> bool:
        if self._channel is not None:
            self._channel.is_open = True  # nobody waits yet: all has been answered
        try:
            self._compute(captured, self._weights)  # compiles kernels, and makes what they keep
            self._send(captured, step)  # what was made for a step belongs into the capture
            captured.replay = self._record(captured)
        except RuntimeError as error:
            self._works = False
            warn_once("capture", f"steps cannot be captured ({error}): decoding will be slower")
        finally:
            if self._channel is not None:
                self._channel.is_open = False
        return self._works


def _room(run: Segment) -> int:
    """Positions that it has pages for: a sequence that grows may have fewer than it may need."""
    return min(run.reserved, run.reserved_tokens or run.reserved)


def _next(runs: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The runs of the step that follows, if all go on."""
    return tuple(replace(run, start=run.start + 1) for run in runs)


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned host memory for a copy of a device's tensor."""
    return host_buffer(tensor.shape, tensor.dtype, tensor.device)
