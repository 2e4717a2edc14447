"""One request as the scheduler sees it: its tokens, its place in the KV cache, its status."""

import itertools
import time
from dataclasses import dataclass, field

from hmt.base.errors import HMTError
from hmt.contracts.request import FinishReason, Pooling
from hmt.contracts.step import ImageTokens
from hmt.engine.scheduling.batch_limit import MemoryPressure
from hmt.weights.adapters import AdapterHold

_numbers = itertools.count(1)
# Times that a sequence gives way to others.  Then it is admitted with all that it may need, and
# stays: so all end.
_MAX_PREEMPTIONS = 2
_SPREAD, _MOST = 0x9E3779B97F4A7C15, 1 << 62


class PromptEnd:
    """Stands for the logits behind a prompt of which there are several answers.

    All of these begin with one.  EngineCore keeps the logits for as long as this lives.
    """


@dataclass(eq=False, slots=True)
class SequenceState:
    """What scheduling a request takes: numbers alone.  Only the engine's thread changes it.

    tokens            prompt and answer so far
    max_total_tokens  positions of KV that prompt and answer may take
    owner, priority   of the request: who is admitted, and who gives way
    cache_salt        of the request: who shares KV pages
    fixed_length      whether nothing ends the answer before max_total_tokens
    scores_prompt     whether log-probabilities of the prompt are wanted and not told yet
    pooling           which hidden states of the prompt are wanted and not told yet
    computed          tokens whose KV has been written
    prefill_tokens    tokens that are computed in chunks, like a prompt: that, and of a sequence
                      that was sent back and has to begin again what it had answered
    whole             tokens whose rotary positions go by their number: the prompt, and of a
                      sequence that has crossed a `RotaryBorder` all that it had then
    kv                handle in the KV cache; None while it has nothing there
    reserved_tokens   positions that are reserved for it
    preemptions       times that it had begun and others needed its place or its room
    prefix_leader     another of the same prompt, whose KV pages are to be shared once
                      computed
    prompt_end        of the prompt that `kv` begins with, while others of the same prompt can begin
                      with it, too
    is_unsettled      whether its last token waits for a grammar, so that it is left out of steps
    error             why it ended, where it failed
    cached_tokens     positions whose KV was in the cache when it began to run
    diverged_at       token of the prompt at which it differed from every sequence in the prefix
                      cache; None: the cache was not asked
    submitted_s, admitted_s   time.perf_counter() when it was made, and when it began to run
    adapter           keeps the low-rank adapter that its tokens are computed with; None: none
    images            tokens of the prompt that stand for images, and `image_hold` which keeps these
    axes              rotary positions of the prompt's tokens on three axes; (): by their places
    axes_shift        what is added to the place of a later token for its positions
    blocks            (first, behind the last) tokens of the prompt that see each other: one step
                      computes those that are not computed
    raised_at         position from which on tokens are computed in higher precision; None: none is
    deadline_s        time.monotonic() at which it fails if it has not ended; None: never
    """

    tokens: list[int]
    prompt_tokens: int
    max_total_tokens: int
    owner: str = ""
    priority: int = 0
    cache_salt: str = ""
    fixed_length: bool = False
    scores_prompt: bool = False
    pooling: Pooling | None = None
    deadline_s: float | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    computed: int = 0
    prefill_tokens: int = field(init=False)
    whole: int = field(init=False)
    axes_shift: int = field(init=False, default=0)
    kv: int | None = None
    reserved_tokens: int = 0
    preemptions: int = 0
    prefix_leader: "SequenceState | None" = None
    prompt_end: PromptEnd | None = None
    is_unsettled: bool = False
    finish_reason: FinishReason | None = None
    error: HMTError | None = None
    cached_tokens: int = 0
    diverged_at: int | None = None
    submitted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    images: tuple[ImageTokens, ...] = ()
    image_hold: object = None
    adapter: AdapterHold | None = None
    axes: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    raised_at: int | None = None

    def __post_init__(self) -> None:
        self.prefill_tokens = self.whole = self.prompt_tokens
        if self.axes:
            self.axes_shift = max(map(max, self.axes)) + 1 - len(self.axes[0])

    @property
    def finished(self) -> bool:
        """True once nothing more will be produced."""
        return self.finish_reason is not None

    @property
    def stays(self) -> bool:
        """Whether it has given way often enough."""
        return self.preemptions >= _MAX_PREEMPTIONS

    @property
    def is_raised(self) -> bool:
        """Whether its next token is computed in higher precision."""
        return self.raised_at is not None and self.computed >= self.raised_at

    @property
    def was_raised(self) -> bool:
        """Whether some of its tokens were computed in higher precision."""
        # Not by `computed`, of which a sequence that has ended may leave some to others.
        return self.raised_at is not None and self.raised_at < len(self.tokens) - 1

    def alike(self, count: int) -> int:
        """Of the next `count` tokens, the first that are computed in one precision."""
        if self.raised_at is None or self.is_raised:
            return count
        return min(count, self.raised_at - self.computed)

    @property
    def answered(self) -> int:
        """Tokens of the answer until now."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def wants_tokens(self) -> bool:
        """False where only the prompt is computed."""
        return self.max_total_tokens > self.prompt_tokens

    @property
    def has_prompt_outputs(self) -> bool:
        """Whether something was asked of the prompt that is not told yet."""
        return self.scores_prompt or self.pooling is not None

    def prompt_output_rows(self, first: int, count: int) -> tuple[int, int]:
        """Of `count` tokens from position `first` on, rows that are scored, and pooled.

        Those that are scored are the first of them, those that are pooled the last.
        """
        left = self.prompt_tokens - first
        if left <= 0 or not self.has_prompt_outputs:
            return 0, 0
        scored = min(count, left - 1) if self.scores_prompt else 0
        if self.pooling is None:
            return scored, 0
        return scored, count if self.pooling is Pooling.MEAN else int(count == left)

    def image_tokens(self, first: int, last: int) -> tuple[ImageTokens, ...]:
        """Of tokens [first, last), those that stand for images; offsets are from `first`."""
        spans = []
        for key, row, offset, count in self.images:
            begin, end = max(first, offset), min(last, offset + count)
            if begin < end:
                spans.append(ImageTokens(key, row + begin - offset, begin - first, end - begin))
        return tuple(spans)

    def blocks_in(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Those that tokens [first, last) are of."""
        return tuple((begin, end) for begin, end in self.blocks if begin < last and end > first)

    def axes_of(self, first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Rotary positions of tokens [first, last) on three axes; (): by their places.

        Those behind the prompt go on behind the largest of it.
        """
        if not self.axes:
            return ()
        known, shift = len(self.axes[0]), self.axes_shift
        behind = tuple(range(max(first, known) + shift, last + shift))
        return tuple(axis[first:last] + behind for axis in self.axes)

    def content(self, count: int) -> list[int]:
        """What the KV of the first `count` tokens depends on: equal where that is.

        Those from `raised_at` on are left out, since theirs depends on more.  For tokens that stand
        for images, negative numbers of 62 bits, made of the image.
        """
        count = count if self.raised_at is None else min(count, self.raised_at)
        content = self.tokens[:count]
        if not self.images:
            return content
        for key, row, offset, rows in self.images:
            begin = int(key[:15], 16) << 2
            for number in range(max(0, min(rows, count - offset))):
                content[offset + number] = -1 - (begin ^ (row + number) * _SPREAD) % _MOST
        return content

    def fail(self, error: HMTError) -> None:
        """End with an error, which the request's owner is told."""
        if not self.finished:
            self.finish_reason, self.error = FinishReason.ERROR, error

    def cancel(self) -> None:
        """End, since the client does not want the rest."""
        if not self.finished:
            self.finish_reason = FinishReason.CANCELLED


def by_rank(sequence: SequenceState) -> tuple[int, int]:
    """By which those that run give way: the largest first."""
    return -sequence.priority, sequence.number


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that wait and that run, and positions of the KV cache: all, and unreserved.

    pressure      how scarce these are, and `used` the share that is in use
    most          requests that may run at once for now
    parked        times that one gave way to others and its KV pages stayed, where there is a lower
                  tier in that
    dropped       times that they did not, and are computed again
    batches       steps by how many requests had tokens in them
    """

    waiting: int
    running: int
    capacity_tokens: int
    free_tokens: int
    pressure: MemoryPressure
    used: float
    most: int
    parked: int
    dropped: int
    batches: dict[int, int]
