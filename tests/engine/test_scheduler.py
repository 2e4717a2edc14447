"""The scheduler over mixtures of requests, without a model, over a cache that only counts."""

import queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ContextLengthError, DeadlineError
from hmt.contracts.request import FinishReason, Request
from hmt.engine.scheduler import Scheduler
from hmt.engine.sequence import Sequence


class CountingKV:
    """Pages, of which sequences reserve what they may take."""

    def __init__(self, tokens: int) -> None:
        self.capacity_tokens = tokens // 16 * 16
        self.open_: dict[int, int] = {}
        self.made = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - sum(self.open_.values())

    def can_open(self, tokens: int) -> bool:
        return -(-tokens // 16) * 16 <= self.free_tokens

    def open(self, tokens: int) -> int:
        assert self.can_open(tokens), "more was promised than there is"
        self.made += 1
        self.open_[self.made] = -(-tokens // 16) * 16
        return self.made

    def can_fork(self, sequence: int, held: int, tokens: int) -> bool:
        return self.can_open(tokens - held // 16 * 16)

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        assert sequence in self.open_
        return self.open(tokens - held // 16 * 16)

    def close(self, sequence: int) -> None:
        del self.open_[sequence]


def sequence(prompt: int, new: int, **fields: Any) -> Sequence:
    request = Request(input=[1], **fields)
    nothing: Any = None
    return Sequence(
        request=request,
        tokens=[1] * prompt,
        prompt_tokens=prompt,
        positions=prompt + new,
        sampler=nothing,
        text=nothing,
        stops=nothing,
        eos_ids=frozenset(),
        events=queue.SimpleQueue(),
    )


def compute(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """One step as the core does it, with tokens that mean nothing."""
    scheduled = scheduler.next_step()
    if scheduled is None:
        return []
    assert sum(count for _, count in scheduled.advanced) == len(scheduled.step.token_ids)
    assert len(scheduled.step.logit_rows) == len(scheduled.sampled)
    forked: list[Sequence] = []
    for one, count in scheduled.advanced:
        one.computed += count
    for one in scheduled.sampled:
        if one.computed == one.prompt_tokens:
            forked += scheduler.fork(one)
    for one in [*scheduled.sampled, *forked]:
        one.tokens.append(1)
        if len(one.tokens) == one.positions:
            one.finish_reason = FinishReason.LENGTH
            scheduler.retire(one)
    return list(scheduled.advanced)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 120),  # prompt
        st.integers(1, 12),  # new
        st.sampled_from("abc"),  # owner
        st.integers(-1, 1),  # priority
        st.integers(1, 3),  # answers
        st.integers(0, 3),  # steps before the next one comes
        st.booleans(),  # cancelled after these
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 64), st.integers(1, 5), st.integers(144, 600))
def test_all_end_and_no_budget_is_ever_exceeded(
    requests: list, chunk: int, batch: int, tokens: int
) -> None:
    kv = CountingKV(tokens)
    scheduler = Scheduler(kv, prefill_chunk=chunk, max_batch=batch)  # type: ignore[arg-type]
    every: list[Sequence] = []

    def step() -> bool:
        advanced = compute(scheduler)
        prompts = sum(count for one, count in advanced if one.computed <= one.prompt_tokens)
        assert prompts <= chunk
        assert sum(count for _, count in advanced) <= chunk + batch
        load = scheduler.load
        assert 0 <= load.running <= batch and load.free_tokens >= 0
        # Never are there requests without anything going on.
        assert advanced or scheduler.idle
        return bool(advanced)

    for prompt, new, owner, priority, answers, steps, cancelled in requests:
        group = [sequence(prompt, new, owner=owner, priority=priority) for _ in range(answers)]
        for one in group:
            one.leader = None if one is group[0] else group[0]
            scheduler.check(one)
            scheduler.add(one)
        every += group
        for _ in range(steps):
            step()
        if cancelled and not group[-1].finished:
            group[-1].cancel()
            scheduler.retire(group[-1])
    for _ in range(10_000):
        if not step():
            break
    assert scheduler.idle and not kv.open_
    assert all(one.finished for one in every)
    assert all(
        len(one.tokens) == one.positions
        for one in every
        if one.finish_reason is FinishReason.LENGTH
    )


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = Scheduler(CountingKV(8192), prefill_chunk=64, max_batch=4)  # type: ignore[arg-type]
    long, short = sequence(4000, 4), sequence(30, 4)
    scheduler.add(long)
    compute(scheduler)
    scheduler.add(short)
    steps = 0
    while short.computed < short.prompt_tokens:
        compute(scheduler)
        steps += 1
    assert steps == 1 and long.computed == 64 + 32


def test_what_does_not_fit_now_is_not_passed_by_its_like() -> None:
    """A large request has its turn, although small ones would fit before."""
    scheduler = Scheduler(CountingKV(304), prefill_chunk=64, max_batch=8)  # type: ignore[arg-type]
    first, large = sequence(100, 60), sequence(200, 100)
    small = [sequence(10, 6) for _ in range(6)]
    for one in (first, large, *small):
        scheduler.add(one)
    while large.admitted_s is None:
        assert compute(scheduler)
        assert all(one.admitted_s is None for one in small)
    assert first.finished


def test_owners_take_turns() -> None:
    scheduler = Scheduler(CountingKV(64), prefill_chunk=64, max_batch=1)  # type: ignore[arg-type]
    crowd = [sequence(10, 2, owner="crowd") for _ in range(6)]
    lone = sequence(10, 2, owner="lone")
    for one in (*crowd, lone):
        scheduler.add(one)
    while not lone.finished:
        assert compute(scheduler)
    assert sum(one.finished for one in crowd) == 1


def test_deadlines_hold_for_those_who_wait_and_for_those_who_run() -> None:
    now = [0.0]
    kv = CountingKV(64)
    scheduler = Scheduler(kv, prefill_chunk=64, max_batch=1, clock=lambda: now[0])  # type: ignore[arg-type]
    running, waiting, patient = sequence(10, 40), sequence(10, 40), sequence(10, 2)
    running.deadline_s, waiting.deadline_s = 5.0, 3.0
    for one in (running, waiting, patient):
        scheduler.add(one)
    compute(scheduler)
    now[0] = 4.0
    compute(scheduler)
    assert waiting.finished and not running.finished
    now[0] = 5.0
    compute(scheduler)
    assert running.finished and patient.admitted_s is not None
    for one, word in ((waiting, "waited"), (running, "ran")):
        error = one.events.get()  # type: ignore[attr-defined]
        assert isinstance(error, DeadlineError) and word in str(error)
    while not scheduler.idle:
        compute(scheduler)
    assert not kv.open_


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(CountingKV(64), prefill_chunk=64, max_batch=1)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match="80 positions"):
        scheduler.check(sequence(60, 5))
