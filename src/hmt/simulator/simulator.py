"""Requests through a plan, without running it: the scheduler's own rules, and predicted steps.

What is simulated is time alone.  The scheduler is the engine's; a step takes what the model of cost
says of it; and while nothing comes, ends or grows, equal steps are taken together.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from hmt.base.errors import ContextLengthError
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.request import FinishReason
from hmt.contracts.step import SchedulerOutput
from hmt.engine.scheduling.scheduler import Scheduler
from hmt.engine.scheduling.sequence import SequenceState
from hmt.kvcache import KVAllocator, PagePool
from hmt.planner.cost.step_costs import MEMORIES, PARTS, StepCosts
from hmt.simulator.traffic import SimulatedRequest, Traffic

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """One request that has had its answer; moments are seconds from the beginning.

    begun_s   when its first step began
    first_s   when it had its first token
    ended_s   when it had its last one
    """

    request: SimulatedRequest
    begun_s: float
    first_s: float
    ended_s: float

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.request.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None of an answer without a second."""
        later = self.request.tokens - 1
        return (self.ended_s - self.first_s) / later if later else None


@dataclass(slots=True)
class SimulationResult:
    """What became of all.

    answered       in the order of their ends
    refused        requests that are longer than the plan has positions for
    wall_s         from the first request to the last token
    busy_s         by part of the machine
    nbytes         read, by memory
    limits_s       seconds of steps by the part that bounded them
    prompt_tokens  computed, those included that were computed again
    steps, batch   steps, and sequences in a step on average over its time
    queue, longest_queue   requests that have had no step yet, on average over time, and at most
    preemptions    times that one gave way to others
    """

    answered: list[SimulatedAnswer] = field(default_factory=list)
    refused: int = 0
    wall_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, float] = field(default_factory=dict)
    limits_s: dict[str, float] = field(default_factory=dict)
    stepping_s: float = 0.0
    prompt_tokens: int = 0
    steps: int = 0
    batch: float = 0.0
    most_batch: int = 0
    queue: float = 0.0
    longest_queue: int = 0
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(one.request.tokens for one in self.answered)

    @property
    def bottleneck(self) -> str:
        """The part that bounded the steps of most of the time; "" where there was none."""
        return max(self.limits_s, key=lambda part: self.limits_s[part], default="")

    def summary(self) -> dict[str, Any]:
        """Everything in numbers, as JSON knows them; times in seconds."""
        wall = self.wall_s or 1.0
        later = [one.tpot_s for one in self.answered if one.tpot_s is not None]
        return {
            "requests": len(self.answered) + self.refused,
            "answered": len(self.answered),
            "refused": self.refused,
            "wall_s": self.wall_s,
            "requests_per_s": len(self.answered) / wall,
            "tokens_per_s": self.tokens / wall,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": _percentiles([one.ttft_s for one in self.answered]),
            "tpot_s": _percentiles(later),
            "e2e_s": _percentiles([one.ended_s - one.request.due_s for one in self.answered]),
            "waiting_s": _percentiles([one.begun_s - one.request.due_s for one in self.answered]),
            "queue": {"mean": self.queue, "most": self.longest_queue},
            "batch": {"mean": self.batch, "most": self.most_batch},
            "steps": self.steps,
            "preemptions": self.preemptions,
            "utilisation": {name: busy / wall for name, busy in self.busy_s.items()},
            "idle": max(0.0, 1 - self.stepping_s / wall),
            "bytes": dict(self.nbytes),
            "bytes_per_s": {name: nbytes / wall for name, nbytes in self.nbytes.items()},
            "bottleneck": self.bottleneck,
            "bound_by": {name: part / wall for name, part in self.limits_s.items()},
        }


def simulate(
    traffic: Traffic, costs: StepCosts, *, positions: int, max_prefill_tokens: int, max_batch: int
) -> SimulationResult:
    """Answer all that is asked.

    positions   of keys and values, at whatever level: moving them between levels takes no time here
    """
    kv = KVAllocator(PagePool(positions // PAGE_TOKENS))
    return _Simulation(traffic, costs, kv, max_prefill_tokens, max_batch).run()


@dataclass(slots=True)
class _Running:
    """A request that is on its way."""

    request: SimulatedRequest
    state: SequenceState
    begun_s: float | None = None
    first_s: float | None = None


class _Simulation:
    def __init__(
        self, traffic: Traffic, costs: StepCosts, kv: KVAllocator, chunk: int, max_batch: int
    ) -> None:
        self._coming = list(reversed(traffic.requests))
        self._follower, self._costs = traffic.followers(), costs
        self._now = 0.0
        self._scheduler = Scheduler(
            kv, max_prefill_tokens=chunk, max_batch=max_batch, clock=lambda: self._now
        )
        self._running: dict[int, _Running] = {}  # by number of the sequence
        self._sums = np.zeros(1 + len(PARTS) + len(MEMORIES))
        self._filled = 0.0
        self._unbegun = 0
        self._before: tuple[int, ...] = ()
        self._found = SimulationResult()

    def run(self) -> SimulationResult:
        found = self._found
        begin = self._coming[-1].due_s if self._coming else 0.0
        self._now = begin
        while True:
            self._arrive()
            output = self._scheduler.next_step()
            if output is not None:
                self._take(output)
            elif self._coming:
                self._now = max(self._now, self._coming[-1].due_s)
            else:
                break
        found.wall_s = self._now - begin
        seconds, busy, nbytes = np.split(self._sums, [1, 1 + len(PARTS)])
        found.stepping_s = float(seconds[0])
        found.busy_s = dict(zip(PARTS, map(float, busy), strict=True))
        found.nbytes = dict(zip(MEMORIES, map(float, nbytes), strict=True))
        found.batch = self._filled / found.stepping_s if found.stepping_s else 0.0
        waited = sum(one.begun_s - one.request.due_s for one in found.answered)
        found.queue = waited / found.wall_s if found.wall_s else 0.0
        load = self._scheduler.load
        found.preemptions = load.parked + load.dropped
        return found

    def _arrive(self) -> None:
        while self._coming and self._coming[-1].due_s <= self._now:
            self._ask(self._coming.pop())

    def _ask(self, asked: SimulatedRequest) -> None:
        sequence = _sequence(asked)
        try:
            self._scheduler.check(sequence)
        except ContextLengthError:
            self._found.refused += 1
            return
        self._running[sequence.number] = _Running(asked, sequence)
        self._unbegun += 1
        self._scheduler.add(sequence)

    def _take(self, output: SchedulerOutput) -> None:
        """This step, and those behind it that are like it."""
        cost, limit = self._cost(output, 0)
        count = self._alike(output, float(cost[0]))
        if count > 1:
            cost, limit = self._cost(output, count)
        found, sequences = self._found, len(output.segments)
        begin, seconds = self._now, float(cost[0]) * count
        self._now += seconds
        self._sums += cost * count
        self._filled += sequences * seconds
        found.longest_queue = max(found.longest_queue, self._unbegun)
        found.most_batch = max(found.most_batch, sequences)
        found.limits_s[limit] = found.limits_s.get(limit, 0.0) + seconds
        found.steps += count
        found.prompt_tokens += output.prompt_tokens
        for segment in output.segments:
            one = self._running[segment.request]
            one.state.computed += segment.length * count
            if one.begun_s is None:
                one.begun_s = begin
                self._unbegun -= 1
        for request in output.sampled:
            self._accept(self._running[request], count)

    def _accept(self, one: _Running, count: int) -> None:
        sequence = one.state
        one.first_s = self._now if one.first_s is None else one.first_s
        sequence.tokens += [0] * count
        asked = one.request
        if len(sequence.tokens) - sequence.prompt_tokens < asked.tokens:
            return
        whole = asked.tokens < asked.max_tokens
        sequence.finish_reason = FinishReason.STOP if whole else FinishReason.LENGTH
        self._scheduler.retire(sequence)
        del self._running[sequence.number]
        assert one.begun_s is not None
        self._found.answered.append(SimulatedAnswer(asked, one.begun_s, one.first_s, self._now))
        if (following := self._follower(self._now)) is not None:
            self._coming.append(following)  # it is due at once, before all others

    def _cost(self, output: SchedulerOutput, count: int) -> "tuple[Any, str]":
        """Of one step; of many like it, of the one in the middle."""
        sequences = len(output.segments)
        reads = [segment.context for segment in output.segments]
        if not output.prompt_tokens:
            mean = sum(reads) / sequences + (count - 1) / 2 * (count > 1)
            return self._costs.decode(sequences, mean)
        every = output.num_tokens
        seen = sum(s.length * (s.start + (s.length + 1) / 2) for s in output.segments)
        return self._costs.mixed(every, sequences, sum(reads) / sequences, seen / every)

    def _alike(self, output: SchedulerOutput, seconds: float) -> int:
        """How many steps from this one on are like it: until one comes, ends or grows."""
        load, segments = self._scheduler.load, output.segments
        members = tuple(segment.request for segment in segments)
        before, self._before = self._before, members
        if output.prompt_tokens or load.running != len(segments):
            return 1
        if load.waiting and members != before:
            return 1  # the next step may admit a request
        running = [self._running[segment.request] for segment in segments]
        ends = [
            min(
                one.request.tokens - one.state.answered,
                one.state.reserved_tokens - len(one.state.tokens) + 1,
            )
            for one in running
        ]
        count = min(ends)
        if self._coming:
            count = min(count, ceil((self._coming[-1].due_s - self._now) / seconds))
        return max(1, count)


def _sequence(asked: SimulatedRequest) -> SequenceState:
    """What the scheduler knows of a request."""
    return SequenceState(
        tokens=[0] * asked.prompt_tokens,
        prompt_tokens=asked.prompt_tokens,
        max_total_tokens=asked.prompt_tokens + asked.max_tokens,
        owner=asked.owner,
        priority=asked.priority,
    )


def _percentiles(values: Many[float]) -> dict[str, float] | None:
    """With straight lines between neighbours; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
