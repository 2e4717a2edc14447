"""The scheduler: which tokens of which requests make up the next step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hmt.base.errors import ContextLengthError, DiskReadError, HMTError
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Part, Step
from hmt.engine.sequence import Sequence
from hmt.kvcache import AnyKV
from hmt.kvcache.prefix import PrefixCache


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step, and whom its logits belong to.

    sampled         sequences in the order of the step's logit rows
    advanced        (sequence, tokens of it in this step)
    prompt_tokens   tokens in this step that belong to prompts
    """

    step: Step
    sampled: tuple[Sequence, ...]
    advanced: tuple[tuple[Sequence, int], ...]
    prompt_tokens: int


class Scheduler:
    """First come, first served; decode tokens in every step, prompts in chunks beside them.

    A request is admitted when its whole KV can be reserved, so that none that has begun is ever
    sent back.  Several answers to one prompt: the others wait until the first has computed the
    prompt, share it, and are on their own from then on; those that find no room compute it again.
    Only for the engine's thread.
    """

    def __init__(
        self,
        kv: AnyKV,
        *,
        prefill_chunk: int,
        max_batch: int,
        prefixes: PrefixCache | None = None,
        salt: Callable[[Sequence], str] = lambda sequence: "",
    ) -> None:
        """`prefixes` of `kv`, whose texts share what begins alike and has the same `salt`."""
        self._kv = kv
        self._chunk = prefill_chunk
        self._max_batch = max_batch
        self._prefixes = prefixes
        self._salt = salt
        self._full = False  # since the last sequence ended
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not self._waiting and not self._running

    def sequences(self) -> list[Sequence]:
        """Everyone who waits or runs."""
        return [*self._waiting, *self._running]

    def add(self, sequence: Sequence) -> None:
        """Queue a request.  Raises ContextLengthError when it could never be admitted."""
        needed = -(-sequence.positions // PAGE_TOKENS) * PAGE_TOKENS
        if needed > self._kv.capacity_tokens:
            raise ContextLengthError(
                f"a prompt of {sequence.prompt_tokens} tokens and "
                f"{sequence.positions - sequence.prompt_tokens} new ones need {needed} "
                f"positions, in pages of {PAGE_TOKENS}; "
                f"the plan has {self._kv.capacity_tokens}: shorten them, or load the model with "
                "a larger context (--context)"
            )
        self._waiting.append(sequence)

    def next_step(self) -> Scheduled | None:
        """The next step, or None when nothing runs."""
        self._admit()
        parts: list[Part] = []
        sampled, advanced = [], []
        budget, prompt_tokens = self._chunk, 0
        for sequence in self._running:
            first = sequence.computed
            count = min(len(sequence.tokens) - first, max(budget, 0)) if sequence.prefilling else 1
            if count == 0:
                continue
            if first < sequence.prompt_tokens:
                budget -= count
                prompt_tokens += count
            complete = first + count == len(sequence.tokens)
            assert sequence.kv is not None
            tokens = sequence.tokens[first : first + count]
            parts.append(Part(sequence.kv, first, tokens, int(complete), sequence.positions))
            advanced.append((sequence, count))
            if complete:
                sampled.append(sequence)
        if not parts:
            return None
        return Scheduled(Step.build(parts), tuple(sampled), tuple(advanced), prompt_tokens)

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
            self._waiting.remove(sequence)
            try:
                sequence.kv = self._kv.fork(leader.kv, held, sequence.positions)
            except HMTError as error:
                sequence.fail(error)
                continue
            sequence.computed = held
            self._running.append(sequence)
            forked.append(sequence)
        return forked

    def retire(self, sequence: Sequence) -> None:
        """Free what a sequence holds; it has finished, failed or been cancelled."""
        if sequence in self._waiting:
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

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch and not self._full:
            sequence = self._waiting[0]
            if sequence.leader is not None:
                if sequence.leader in self._running:
                    return  # which others would delay, who came later
                sequence.leader = None
            try:
                if not self._open(sequence):
                    self._full = True
                    return
            except DiskReadError as error:
                self._waiting.popleft()
                sequence.fail(error)
                continue
            self._running.append(self._waiting.popleft())

    def _open(self, sequence: Sequence) -> bool:
        """Reserve what a sequence takes, if there is room."""
        if self._prefixes is None:
            if not self._kv.can_open(sequence.positions):
                return False
            sequence.kv = self._kv.open(sequence.positions)
            return True
        prompt = sequence.tokens[: sequence.prompt_tokens]
        opened = self._prefixes.open(sequence.positions, prompt, self._salt(sequence))
        if opened is None:
            return False
        sequence.kv, sequence.computed = opened.sequence, opened.held
        return True
