"""The scheduler over mixtures of requests, without a model, over the engine's own allocator."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ContextLengthError, DeadlineError
from hmt.contracts.request import FinishReason
from hmt.contracts.step import Segment, Step
from hmt.engine.scheduling.batch_limit import BatchLimit, MemoryPressure
from hmt.engine.scheduling.output_length import OutputLengthEstimate
from hmt.engine.scheduling.scheduler import Scheduler
from hmt.engine.scheduling.sequence import SequenceState
from hmt.kvcache import KVAllocator, PagePool


class WatchedKV(KVAllocator):
    """The engine's allocator, without a storage; asserts that what was promised is kept.

    At most `near` sequences may take part in steps at once, as where pages move.
    """

    def __init__(self, tokens: int, near: int = 100) -> None:
        super().__init__(PagePool(tokens // 16))
        self.near, self.parks = near, True
        self.rows: Counter[int] = Counter()  # by sequence

    @property
    def parked(self) -> set[int]:
        return {number for number, held in self.sequences.items() if held.parked}

    def append(self, run: Segment) -> None:
        """What is computed comes after what is there, and where there is room."""
        assert run.sequence not in self.parked
        assert run.start == self.rows[run.sequence]
        assert run.context <= self.reserved_tokens(run.sequence) == run.reserved_tokens
        self.rows[run.sequence] = run.context

    def open(self, tokens: int) -> int:
        assert self.can_open(tokens), "more was promised than there is"
        return super().open(tokens)

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        assert held == self.rows[sequence]
        forked = super().fork(sequence, held, tokens)
        self.rows[forked] = held
        return forked

    def shrink(self, sequence: int, tokens: int) -> None:
        assert tokens >= self.rows[sequence]
        super().shrink(sequence, tokens)

    def rewind(self, sequence: int, tokens: int) -> None:
        assert tokens <= self.rows[sequence]
        self.rows[sequence] = tokens
        super().rewind(sequence, tokens)

    def can_park(self) -> bool:
        return self.parks

    def park(self, sequence: int) -> None:
        assert self.parks and sequence not in self.parked
        super().park(sequence)

    def resume(self, sequence: int, tokens: int) -> None:
        assert self.can_resume(sequence, tokens) and sequence in self.parked
        super().resume(sequence, tokens)

    def has_running_room(self, more_running: int, more_parked: int = 0) -> bool:
        return len(self.sequences) - len(self.parked) + more_running <= self.near


def sequence(prompt: int, new: int, **fields: Any) -> SequenceState:
    return SequenceState([1] * prompt, prompt, prompt + new, **fields)


def compute(
    scheduler: Scheduler, ends: Mapping[int, int] = MappingProxyType({})
) -> list[tuple[SequenceState, int]]:
    """One step as the core does it, with tokens that mean nothing.

    ends   by number: tokens of answers that end by themselves
    """
    states = {one.number: one for one in scheduler.sequences()}
    output = scheduler.next_step()
    if output is None:
        return []
    kv: Any = scheduler.kv.allocator
    step = Step.build(output.segments)
    for run in step.segments:
        kv.append(run)
    assert output.num_tokens == len(step.token_ids)
    assert len(step.logit_rows) == len(output.sampled)
    advanced = [(states[segment.request], segment.length) for segment in output.segments]
    sampled = [states[number] for number in output.sampled]
    forked: list[SequenceState] = []
    for one, count in advanced:
        one.computed += count
    for one in sampled:
        if one.computed == one.prompt_tokens:
            forked += scheduler.fork(one)
    for one in [*sampled, *forked]:
        one.tokens.append(1)
        if len(one.tokens) - one.prompt_tokens == ends.get(one.number):
            one.finish_reason = FinishReason.STOP
        elif len(one.tokens) == one.max_total_tokens:
            one.finish_reason = FinishReason.LENGTH
        if one.finished:
            scheduler.retire(one)
    return advanced


def expecting(tokens: int | None) -> OutputLengthEstimate:
    """A forecast after answers of so many tokens; None: after none."""
    forecast = OutputLengthEstimate()
    for _ in range(8 if tokens else 0):
        forecast.note("", tokens or 0, whole=True)
    return forecast


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 80),  # prompt
        st.integers(1, 80),  # new, at most
        st.integers(1, 90),  # new, where the answer ends by itself
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
@given(
    REQUESTS,
    st.integers(1, 64),
    st.integers(1, 5),
    st.integers(160, 600),
    st.integers(1, 5),
    st.sampled_from([None, 1, 30]),
)
def test_all_end_and_no_budget_is_ever_exceeded(
    requests: list, chunk: int, batch: int, tokens: int, near: int, known: int | None
) -> None:
    """Whatever was expected of answers; what was computed before is neither lost nor taken twice.

    `known` is how long answers were until now.
    """
    kv = WatchedKV(tokens, near)
    kv.parks = chunk % 4 > 0
    forecast = expecting(known)
    scheduler = Scheduler(kv, max_prefill_tokens=chunk, max_batch=batch, forecast=forecast)
    every: list[SequenceState] = []
    ends: dict[int, int] = {}

    def step() -> bool:
        advanced = compute(scheduler, ends)
        prompts = sum(count for one, count in advanced if one.computed <= one.prompt_tokens)
        assert prompts <= chunk
        assert sum(count for _, count in advanced) <= chunk + batch
        load = scheduler.load
        assert 0 <= load.running <= batch and load.free_tokens >= 0
        # Never are there requests without anything going on.
        assert advanced or scheduler.idle
        assert all(one.preemptions <= 2 for one in every)
        return bool(advanced)

    for prompt, new, end, owner, priority, answers, steps, cancelled in requests:
        group = [sequence(prompt, new, owner=owner, priority=priority) for _ in range(answers)]
        for one in group:
            one.prefix_leader = None if one is group[0] else group[0]
            ends[one.number] = end + group.index(one)
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
    assert scheduler.idle and not kv.sequences
    assert all(one.finished for one in every)
    for one in every:
        answer = min(one.max_total_tokens - one.prompt_tokens, ends[one.number])
        if one.finish_reason is not FinishReason.CANCELLED:
            assert len(one.tokens) - one.prompt_tokens == answer
    if known is None and len(every) < 8 and len({one.priority for one in every}) == 1:
        assert scheduler.load.dropped == 0, "the longest was reserved"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = Scheduler(WatchedKV(8192), max_prefill_tokens=64, max_batch=4)
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
    scheduler = Scheduler(WatchedKV(304), max_prefill_tokens=64, max_batch=8)
    first, large = sequence(100, 60), sequence(200, 100)
    small = [sequence(10, 6) for _ in range(6)]
    for one in (first, large, *small):
        scheduler.add(one)
    while large.admitted_s is None:
        assert compute(scheduler)
        assert all(one.admitted_s is None for one in small)
    assert first.finished


def test_owners_take_turns() -> None:
    scheduler = Scheduler(WatchedKV(64), max_prefill_tokens=64, max_batch=1)
    crowd = [sequence(10, 2, owner="crowd") for _ in range(6)]
    lone = sequence(10, 2, owner="lone")
    for one in (*crowd, lone):
        scheduler.add(one)
    while not lone.finished:
        assert compute(scheduler)
    assert sum(one.finished for one in crowd) == 1


def test_deadlines_hold_for_those_who_wait_and_for_those_who_run() -> None:
    now = [0.0]
    kv = WatchedKV(64)
    scheduler = Scheduler(kv, max_prefill_tokens=64, max_batch=1, clock=lambda: now[0])
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
        assert isinstance(one.error, DeadlineError) and word in str(one.error)
    while not scheduler.idle:
        compute(scheduler)
    assert not kv.sequences


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(WatchedKV(64), max_prefill_tokens=64, max_batch=1)
    with pytest.raises(ContextLengthError, match="80 positions"):
        scheduler.check(sequence(60, 5))


def test_who_grows_takes_spare_room_and_then_the_place_of_the_least_and_youngest() -> None:
    kv = WatchedKV(240)
    scheduler = Scheduler(kv, max_prefill_tokens=240, max_batch=8, forecast=expecting(20))
    old, low, young = sequence(40, 160), sequence(40, 160, priority=-1), sequence(40, 160)
    for one in (old, low, young):
        scheduler.add(one)
    while not low.preemptions:
        assert compute(scheduler)
        running = [one for one in (old, low, young) if one.kv is not None]
        assert len(running) == 3 or scheduler.load.dropped
        spare = [one.reserved_tokens - len(one.tokens) >= 16 for one in running]
    assert not any(spare) and low.kv is None and not young.preemptions
    while not young.preemptions:
        assert compute(scheduler)
    assert not old.preemptions
    while not scheduler.idle:
        assert compute(scheduler)
    assert old.preemptions == 0 and all(one.preemptions <= 2 for one in (low, young))
    assert all(len(one.tokens) == 200 for one in (old, low, young)) and not kv.sequences


@pytest.mark.parametrize(("batch", "near"), [(2, 9), (9, 2)], ids=["batch", "near"])
def test_who_gives_way_to_a_higher_priority_keeps_what_was_computed(batch: int, near: int) -> None:
    kv = WatchedKV(640, near)
    scheduler = Scheduler(kv, max_prefill_tokens=640, max_batch=batch)
    first, second, urgent = sequence(40, 60), sequence(40, 60), sequence(40, 60, priority=1)
    for one in (first, second):
        scheduler.add(one)
    for _ in range(10):
        compute(scheduler)
    scheduler.add(urgent)
    compute(scheduler)
    assert urgent.computed == 40 and second.preemptions == 1 and first.preemptions == 0
    assert kv.parked == {second.kv} and second.computed == 49
    while not scheduler.idle:
        assert compute(scheduler)
    load = scheduler.load
    assert (load.parked, load.dropped) == (1, 0)
    assert sum(load.batches.values()) > 60 and max(load.batches) == 2
    assert len(second.tokens) == 100


def test_room_is_found_again_that_others_than_requests_had() -> None:
    """A beam search, or teacher forcing, that held everything, and of which nobody is told."""
    kv = WatchedKV(64)
    scheduler = Scheduler(kv, max_prefill_tokens=64, max_batch=2)
    other, one = kv.open(64), sequence(20, 4)
    scheduler.add(one)
    assert not compute(scheduler) and not compute(scheduler)
    kv.close(other)
    assert compute(scheduler) and one.computed == 20


def test_the_batch_shrinks_under_pressure_and_grows_again() -> None:
    limit = BatchLimit(16)

    def look(
        used: float, running: int, *, at_risk: bool = True, back: bool = False
    ) -> MemoryPressure:
        limit.update(used, running, at_risk=at_risk, sent_back=back)
        return limit.level

    assert look(0.99, 12, at_risk=False) is MemoryPressure.EASY, (
        "all that run have what they may need"
    )
    assert look(0.89, 12) is MemoryPressure.EASY and limit.most == 16
    assert look(0.91, 12) is MemoryPressure.TIGHT and limit.most == 12
    assert look(0.81, 8) is MemoryPressure.TIGHT and limit.most == 12
    assert look(0.98, 12) is MemoryPressure.SHORT and limit.most == 9
    assert look(0.95, 9) is MemoryPressure.SHORT and limit.most == 9
    assert look(0.95, 8, back=True) is MemoryPressure.SHORT and limit.most == 6
    assert look(0.89, 5) is MemoryPressure.TIGHT and limit.most == 5
    assert look(0.79, 5) is MemoryPressure.EASY and limit.most == 16
    assert look(0.2, 1, back=True) is MemoryPressure.SHORT and limit.most == 1


def test_what_is_expected_of_answers() -> None:
    forecast = OutputLengthEstimate()
    for _ in range(7):
        forecast.note("a", 10, whole=True)
    assert forecast.expected("a", 500) == 500, "of few answers nothing is known"
    forecast.note("b", 10, whole=True)
    assert forecast.expected("b", 500) == forecast.expected("c", 500) == 10
    assert forecast.expected("a", 5) == 5
    assert forecast.expected("a", 500, so_far=10) == 20, "longer than all before"
    for number in range(12):
        forecast.note("b", 100 + number, whole=number != 11)
    assert forecast.expected("b", 105) == 105
    assert 104 <= forecast.expected("b", 500) <= 107
    assert forecast.expected("b", 500, so_far=110) == 500, "one was cut off, and may go on"
