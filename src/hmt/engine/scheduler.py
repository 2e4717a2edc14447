"""The scheduler: which tokens of which requests make up the next step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hmt.base.errors import ContextLengthError, DeadlineError, DiskReadError, HMTError
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Part, Step
from hmt.engine.sequence import Sequence
from hmt.engine.shares import share_out
from hmt.engine.waiting import WaitingQueue
from hmt.kvcache import AnyKV
from hmt.kvcache.prefix import PrefixCache


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step, and whom its logits belong to.

    sampled         sequences in the order of the step's logit rows
    advanced        (sequence, tokens of it in this step)
    prompt_tokens   tokens in this step that belong to prompts
    scored          (sequence, position) of the step's scored rows, which tell of the token behind
    pooled          (sequence, position) of its pooled rows
    """

    step: Step
    sampled: tuple[Sequence, ...]
    advanced: tuple[tuple[Sequence, int], ...]
    prompt_tokens: int
    scored: tuple[tuple[Sequence, int], ...] = ()
    pooled: tuple[tuple[Sequence, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that wait and that run, and positions of keys and values: all, and unreserved."""

    waiting: int
    running: int
    capacity_tokens: int
    free_tokens: int


class Scheduler:
    """Decode tokens in every step, prompts in chunks beside them: `share_out` says whose.

    A request is admitted when its whole KV can be reserved, prompt and longest answer, so that none
    that has begun is ever sent back; `WaitingQueue` says who is next, and while there is no room
    for them, nobody passes.  Several answers to one prompt: the others wait until the first has
    computed the prompt, share it, and are on their own from then on; those that find no room
    compute it again.  Only for the engine's thread.
    """

    def __init__(
        self,
        kv: AnyKV,
        *,
        prefill_chunk: int,
        max_batch: int,
        prefixes: PrefixCache | None = None,
        salt: Callable[[Sequence], str] = lambda sequence: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A step holds `prefill_chunk` tokens of prompts at most, and one of each other request.

        prefixes   of `kv`: texts share what begins alike and has the same `salt`
        clock      by which deadlines are meant
        """
        self._kv = kv
        self._chunk = prefill_chunk
        self._max_batch = max_batch
        self._prefixes = prefixes
        self._salt = salt
        self._clock = clock
        self._full = False  # since the last sequence came or ended
        self._waiting: WaitingQueue[Sequence] = WaitingQueue()
        self._running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not len(self._waiting) and not self._running

    @property
    def load(self) -> Load:
        """Who waits and runs, and what room there is."""
        kv = self._kv
        return Load(len(self._waiting), len(self._running), kv.capacity_tokens, kv.free_tokens)

    def sequences(self) -> list[Sequence]:
        """Everyone who waits or runs."""
        return [*self._waiting, *self._running]

    def check(self, sequence: Sequence) -> None:
        """Raise ContextLengthError where a request could never be admitted.  For any thread."""
        needed = -(-sequence.positions // PAGE_TOKENS) * PAGE_TOKENS
        if needed > self._kv.capacity_tokens:
            raise ContextLengthError(
                f"a prompt of {sequence.prompt_tokens} tokens and "
                f"{sequence.positions - sequence.prompt_tokens} new ones need {needed} "
                f"positions, in pages of {PAGE_TOKENS}; "
                f"the plan has {self._kv.capacity_tokens}: shorten them, or load the model with "
                "a larger context (--context)"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a request that `check` lets pass."""
        request = sequence.request
        self._waiting.add(
            sequence, owner=request.owner, priority=request.priority, cost=sequence.positions
        )
        self._full = False

    def next_step(self) -> Scheduled | None:
        """The next step, or None when nothing runs."""
        self._expire()
        self._admit()
        reading = [one for one in self._running if one.computed < one.prompt_tokens]
        shares = share_out([(s.computed, len(s.tokens) - s.computed) for s in reading], self._chunk)
        counts = {sequence.number: n for sequence, n in zip(reading, shares, strict=True)}
        parts: list[Part] = []
        sampled, advanced = [], []
        scored: list[tuple[Sequence, int]] = []
        pooled: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            first, count = sequence.computed, counts.get(sequence.number, 1)
            if count == 0:
                continue
            complete = first + count == len(sequence.tokens)
            wanted = int(complete and sequence.wants_tokens)
            scores, pools = sequence.shown_rows(first, count)
            scored += [(sequence, first + n) for n in range(scores)]
            pooled += [(sequence, first + count - pools + n) for n in range(pools)]
            assert sequence.kv is not None
            tokens = sequence.tokens[first : first + count]
            reserved = sequence.positions
            parts.append(Part(sequence.kv, first, tokens, wanted, reserved, scores, pools))
            advanced.append((sequence, count))
            if wanted:
                sampled.append(sequence)
        if not parts:
            return None
        return Scheduled(
            Step.build(parts),
            tuple(sampled),
            tuple(advanced),
            sum(shares),
            tuple(scored),
            tuple(pooled),
        )

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Sequences that run from now on with the prompt that `leader` has just computed."""
        forked = []
        for sequence in [one for one in self._waiting if one.leader is leader]:
            sequence.leader = None
            held = leader.computed
            if leader.kv is None or len(self._running) >= self._max_batch:
                continue
            if not self._kv.can_fork(leader.kv, held, sequence.positions):
                continue
            self._waiting.take(sequence)
            try:
                sequence.kv = self._kv.fork(leader.kv, held, sequence.positions)
            except HMTError as error:
                sequence.fail(error)
                continue
            sequence.computed = held
            self._begin(sequence)
            forked.append(sequence)
        return forked

    def retire(self, sequence: Sequence) -> None:
        """Free what a sequence holds; it has finished, failed or been cancelled."""
        self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self._full = False
        if sequence.kv is None:
            return
        if self._prefixes is None:
            self._kv.close(sequence.kv)
        else:
            computed = sequence.tokens[: sequence.computed]
            self._prefixes.close(sequence.kv, computed, self._salt(sequence))
        sequence.kv = None

    def _expire(self) -> None:
        """Fail those whose deadline has passed."""
        now = self._clock()
        for sequence in self.sequences():
            if sequence.deadline_s is not None and sequence.deadline_s <= now:
                state = "waited" if sequence.admitted_s is None else "ran"
                sequence.fail(
                    DeadlineError(
                        f"the request still {state} when its time was over, with "
                        f"{len(self._running)} running and {len(self._waiting)} waiting: try again "
                        "later, or allow more time"
                    )
                )
                self.retire(sequence)

    def _admit(self) -> None:
        while len(self._running) < self._max_batch and not self._full:
            sequence = self._waiting.head(self._is_ready)
            if sequence is None:
                return
            sequence.leader = None
            try:
                if not self._open(sequence):
                    self._full = True
                    return
            except DiskReadError as error:
                self._waiting.remove(sequence)
                sequence.fail(error)
                continue
            self._waiting.take(sequence)
            self._begin(sequence)

    def _is_ready(self, sequence: Sequence) -> bool:
        """False while another computes its prompt, which it will share."""
        return sequence.leader is None or sequence.leader not in self._running

    def _begin(self, sequence: Sequence) -> None:
        sequence.held = sequence.computed
        sequence.admitted_s = time.perf_counter()
        self._running.append(sequence)

    def _open(self, sequence: Sequence) -> bool:
        """Reserve what a sequence takes, if there is room."""
        if self._prefixes is None:
            if not self._kv.can_open(sequence.positions):
                return False
            sequence.kv = self._kv.open(sequence.positions)
            return True
        # What is held is not computed, and has nothing to show.
        held = 0 if sequence.shows else sequence.prompt_tokens
        prompt = sequence.tokens[:held]
        opened = self._prefixes.open(sequence.positions, prompt, self._salt(sequence))
        if opened is None:
            return False
        sequence.kv, sequence.computed = opened.sequence, opened.held
        return True
