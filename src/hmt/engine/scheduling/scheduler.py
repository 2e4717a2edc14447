"""The scheduler: which tokens of which requests make up the next step."""

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from operator import attrgetter

from hmt.base.errors import ContextLengthError, DeadlineError, HMTError, RequestError
from hmt.contracts.model import PAGE_TOKENS, RotaryBorder
from hmt.contracts.request import FinishReason
from hmt.contracts.step import SchedulerOutput, SegmentRequest
from hmt.engine.scheduling.batch_limit import BatchLimit
from hmt.engine.scheduling.choices import Choices
from hmt.engine.scheduling.draft_branches import Alternatives, DraftBranches
from hmt.engine.scheduling.kv_operations import KVOperationLog
from hmt.engine.scheduling.kv_reservation import KVReservation
from hmt.engine.scheduling.output_length import OutputLengthEstimate
from hmt.engine.scheduling.prefill_budget import check_blocks, prefill_shares
from hmt.engine.scheduling.request_queue import RequestQueue, Taken
from hmt.engine.scheduling.sequence import Load, PromptEnd, SequenceState, by_rank
from hmt.kvcache import KVAllocator, checkpoint_interval
from hmt.kvcache.prefix import PrefixCache

_AHEAD = 4 * PAGE_TOKENS  # positions that a sequence grows by where there are enough


class Scheduler:
    """Decode tokens in every step, prompts in chunks beside them.

    `split_prefill_budget` says whose.

    A request is admitted when its prompt and the answer that is expected of it can be reserved, and
    grows page by page if the answer becomes longer.  `RequestQueue` says who is next, and while
    there is no room for that one, no other passes.  Who has to grow and finds nothing takes what
    others have reserved and not begun.  After that a sequence is sent back: the lowest priority
    first, of these the one that came last.  Answers do not depend on that.  A sequence that was
    sent back twice is admitted with all that it may need, and is not sent back any more.

    Several answers to one prompt: the others wait until the first has computed the prompt, and
    share it.  Those for which there is no place then begin with it later: the last one to end
    leaves it to one that waits.  It is computed again only where a sequence gave it up for others'
    room, and where layers with a sliding window have forgotten it and there is no room for a copy.
    Only for the engine's thread.
    """

    def __init__(
        self,
        kv: KVAllocator,
        *,
        max_prefill_tokens: int,
        max_batch: int,
        prefixes: PrefixCache | None = None,
        salt: Callable[[SequenceState], str] = lambda sequence: "",
        border: RotaryBorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        forecast: OutputLengthEstimate | None = None,
        checkpoints: bool = False,
        begin_answer: Callable[[SequenceState, PromptEnd], None] = lambda sequence, end: None,
        token_window: int = 0,
        draft: Callable[[SequenceState, int, int], tuple[int, ...]] = lambda *_: (),
        alternatives: Alternatives = lambda *_: (),
    ) -> None:
        """A step holds `max_prefill_tokens` of prompts at most, and one of each other request.

        prefixes   of `kv`: sequences share what begins alike and has the same `salt`
        border     of the model's rotary positions
        clock      by which deadlines are meant
        forecast   what is known of answers beforehand
        checkpoints   steps begin at the last border of a page within each prompt, and at multiples
                   of `checkpoint_interval`: there recurrent state is kept for others
        token_window   of the model
        begin_answer   chooses the first token of a sequence by the logits of another's prompt
        draft      a sequence's draft tokens, at most so many, in a step of so many
                   sequences that reads no prompt; `alternatives` of these are `branches`
        """
        self.kv = KVOperationLog(kv)
        self._allocator = kv
        self._rooms = KVReservation(self.kv, prefixes, salt)
        self._chunk = max_prefill_tokens
        self._border = border
        self._clock = clock
        self._forecast = OutputLengthEstimate() if forecast is None else forecast
        self._limit = BatchLimit(max_batch)
        self._begin_first = begin_answer
        self._checkpoints = checkpoints
        self._token_window = token_window
        self._draft = draft
        self.branches = DraftBranches(self.kv, alternatives)
        self._full = False  # since the last sequence came or ended
        self._waiting: RequestQueue[SequenceState] = RequestQueue()
        self._running: list[SequenceState] = []
        self._choices = Choices(self._rooms, self._waiting, self._running)
        self._places: dict[int, Taken[SequenceState]] = {}  # of those that run, by number
        self._timed: dict[int, SequenceState] = {}  # that have a deadline, by number
        self._parked = self._dropped = 0
        self._batches: Counter[int] = Counter()
        self._ended: list[SequenceState] = []

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not len(self._waiting) and not self._running

    @property
    def load(self) -> Load:
        """Who waits and runs, and what room there is."""
        return Load(
            len(self._waiting),
            len(self._running),
            self._allocator.capacity_tokens,
            self._allocator.free_tokens,
            self._limit.level,
            self._limit.used,
            self._limit.most,
            self._parked,
            self._dropped,
            dict(self._batches),
        )

    def sequences(self) -> list[SequenceState]:
        """Everyone who waits or runs."""
        return [*self._waiting, *self._running]

    def check(self, sequence: SequenceState) -> None:
        """Raise ContextLengthError where a request could never be admitted.  For any thread.

        Raises RequestError where its owner or cache_salt is not a string.
        """
        owner, salt = sequence.owner, sequence.cache_salt
        if not isinstance(owner, str) or not isinstance(salt, str):
            raise RequestError(f"owner {owner!r} and cache_salt {salt!r} must be text")
        check_blocks(sequence.blocks, self._chunk)
        needed = -(-sequence.max_total_tokens // PAGE_TOKENS) * PAGE_TOKENS
        if needed > self._allocator.capacity_tokens:
            raise ContextLengthError(
                f"a prompt of {sequence.prompt_tokens} tokens and "
                f"{sequence.max_total_tokens - sequence.prompt_tokens} new ones need {needed} "
                f"positions, in pages of {PAGE_TOKENS}; "
                f"the plan has {self._allocator.capacity_tokens}: shorten them, or load the model "
                "with a larger context (--context)"
            )

    def add(self, sequence: SequenceState) -> None:
        """Queue a request that `check` lets pass."""
        cost = self._expected(sequence)
        self._waiting.add(sequence, owner=sequence.owner, priority=sequence.priority, cost=cost)
        if sequence.deadline_s is not None:
            self._timed[sequence.number] = sequence
        self._full = False

    def next_step(self) -> SchedulerOutput | None:
        """The next step, or None when nothing runs, or all wait for their forms."""
        self._expire()
        self._update_batch_limit(sent_back=self._grow())
        self._admit()
        while self._cross():
            self._admit()
        running = [one for one in self._running if not one.is_unsettled]
        reading = [one for one in running if one.computed < one.prefill_tokens]
        interval = checkpoint_interval(self._chunk) if self._checkpoints else 0
        shares = prefill_shares(reading, self._chunk, interval)
        counts = {one.number: one.alike(n) for one, n in zip(reading, shares, strict=True)}
        segments = [
            self._segment(sequence, count, () if reading else self._drafts(sequence, len(running)))
            for sequence in running
            if (count := counts.get(sequence.number, 1))
        ]
        if not segments:
            return None
        self._batches[len(segments)] += 1
        segments = self.branches.with_branches(sorted(segments, key=attrgetter("raised")))
        return SchedulerOutput(tuple(segments), sum(counts.values()), self.kv.take())

    def _drafts(self, sequence: SequenceState, sequences: int) -> tuple[int, ...]:
        """Draft tokens of a sequence that decodes, for which it has places already."""
        end = len(sequence.tokens)
        room = min(sequence.reserved_tokens, sequence.max_total_tokens - 1)
        border = self._border
        if border is not None and not border.gradual and sequence.whole <= border.positions:
            room = min(room, border.positions)  # what is behind it is computed again
        if sequence.raised_at is not None:  # behind it nothing is drafted
            room = min(room, sequence.raised_at)
        return self._draft(sequence, room - end, sequences) if room > end else ()

    def _segment(
        self, sequence: SequenceState, count: int, drafts: tuple[int, ...]
    ) -> SegmentRequest:
        """The next `count` tokens of a sequence, and draft tokens behind them."""
        assert sequence.kv is not None
        first, last = sequence.computed, sequence.computed + count
        if last + len(drafts) > sequence.reserved_tokens:  # kernels would write beside its pages
            raise AssertionError("a step has more positions than were reserved")
        scored, pooled = sequence.prompt_output_rows(first, count)
        return SegmentRequest(
            sequence.kv,
            first,
            [*sequence.tokens[first:last], *drafts],
            len(drafts) + int(last == len(sequence.tokens) and sequence.wants_tokens),
            sequence.max_total_tokens,
            sequence.reserved_tokens,
            scored,
            pooled,
            sequence.whole,
            sequence.number,
            len(drafts),
            preceding=tuple(sequence.tokens[max(0, first - self._token_window) : first]),
            images=sequence.image_tokens(first, last),
            axes=sequence.axes_of(first, last + len(drafts)),
            blocks=sequence.blocks_in(first, last),
            raised=sequence.is_raised,
            adapter=0 if sequence.adapter is None else sequence.adapter.number,
        )

    def take_back(self, sequence: SequenceState) -> None:
        """Let a sequence hold no more than what counts as computed: the rest were drafts."""
        assert sequence.kv is not None
        self.kv.rollback(sequence.kv, sequence.computed)

    def take_ended(self) -> list[SequenceState]:
        """Those that were retired since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def fork(
        self, leader: SequenceState, keep_end: Callable[[], PromptEnd] | None = None
    ) -> list[SequenceState]:
        """Sequences that run from now on with the prompt that `leader` has just computed.

        keep_end   keeps the logits that follow the prompt, for others that begin with them once
                   there is a place for them; without it they compute the prompt
        """
        waiting, forked = self._choices.followers(leader), list[SequenceState]()
        for sequence in waiting:
            sequence.prefix_leader = None
        places = self._limit.most - len(self._running)
        # Others begin with the keys of the prompt alone: see `RotaryBorder`.
        shares = leader.kv is not None and leader.whole == leader.prompt_tokens
        source = None
        if keep_end is not None and shares:
            source = self._choices.source(leader, waiting, places)
        for sequence in waiting:
            if not shares or sequence is source or len(self._running) >= self._limit.most:
                continue
            try:
                positions, spare = self._expected(sequence), self._spare()
                if not self._rooms.fork(leader, sequence, positions, spare):
                    continue
            except HMTError as error:
                sequence.fail(error)
                self.retire(sequence)
                continue
            self._begin(sequence)
            forked.append(sequence)
        late = [one for one in waiting if one.kv is None and not one.finished]
        if keep_end is not None and source is not None and (late or source is not leader):
            end = keep_end()
            for holder in (leader, *forked) if source is leader else (source,):
                holder.prompt_end = end
        for sequence in late if source is not None else late[1:]:
            sequence.prefix_leader = late[0] if source is None else source
        return forked

    def retire(self, sequence: SequenceState) -> None:
        """Free what a sequence holds; it has finished, failed or been cancelled."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._timed.pop(sequence.number, None)
        self._places.pop(sequence.number, None)
        self._full = False
        self._choices.release(sequence, ended=True)
        self.branches.drop(sequence.number)
        self._rooms.close(sequence)
        reason = sequence.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.fixed_length:
            answer = sequence.answered
            whole = reason is FinishReason.STOP
            self._forecast.note(sequence.owner, answer, whole=whole)
        self._ended.append(sequence)

    def _expire(self) -> None:
        """Fail those whose deadline has passed."""
        now = self._clock()
        for sequence in list(self._timed.values()):
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

    # Who grows, and who gives way

    def _grow(self) -> bool:
        """Find room for the next token of all that run; whether a sequence was sent back for it."""
        before = self._dropped
        for sequence in sorted(self._running, key=by_rank):
            needed = len(sequence.tokens)
            if sequence not in self._running or sequence.reserved_tokens >= needed:
                continue
            ahead = min(sequence.max_total_tokens, needed + _AHEAD)
            if self._allocator.free_tokens < 2 * _AHEAD or not self._rooms.grow(sequence, ahead):
                while sequence in self._running and not self._rooms.grow(sequence, needed):
                    self._give_up_some()
        return self._dropped > before

    def _give_up_some(self) -> None:
        """Free a page or more of those who rank lowest."""
        ranked = sorted(self._running, key=by_rank, reverse=True)
        if any(self._rooms.shrink(one, 1) for one in ranked if not one.stays):
            return
        if waiting := self._put_aside():
            self._drop(waiting[0])
        else:
            self._send_back(next(one for one in ranked if not one.stays), park=False)

    def _put_aside(self) -> list[SequenceState]:
        """Those that wait and hold KV pages, who rank lowest first."""
        there = [one for one in self._waiting if one.kv is not None]
        return sorted(there, key=by_rank, reverse=True)

    def _send_back(self, sequence: SequenceState, *, park: bool) -> None:
        """Let a sequence that runs wait again, and go on later."""
        self._running.remove(sequence)
        self._waiting.restore(self._places.pop(sequence.number))
        self._full = False
        sequence.preemptions += 1
        if park and self._allocator.can_park():
            self._rooms.park(sequence)
            self._parked += 1
        else:
            self._drop(sequence)

    def _cross(self) -> bool:
        """Let sequences whose next token is beyond the model's rotary border begin again.

        See `RotaryBorder`.  Returns whether any of them has to wait for room to do so.
        """
        border, waits = self._border, False
        if border is None or border.gradual:
            return False
        for sequence in list(self._running):
            if not sequence.whole <= border.positions < len(sequence.tokens):
                continue
            room = min(sequence.reserved_tokens, sequence.max_total_tokens)
            self._choices.release(sequence, ended=False)
            self._rooms.drop(sequence, others_need=False)
            sequence.prefill_tokens = sequence.whole = len(sequence.tokens)
            try:
                if self._rooms.enter(sequence, room, 0):
                    continue
            except HMTError as error:
                sequence.fail(error)
                self.retire(sequence)
                continue
            # Its pages stay with others that share them.
            self._running.remove(sequence)
            self._waiting.restore(self._places.pop(sequence.number))
            self._full, waits = False, True
        return waits

    def _drop(self, sequence: SequenceState) -> None:
        """Take all KV pages from a sequence that waits."""
        self._choices.release(sequence, ended=False)
        self._rooms.drop(sequence)
        sequence.prefill_tokens = len(sequence.tokens)
        self._dropped += 1

    def _update_batch_limit(self, *, sent_back: bool) -> None:
        free, every = self._allocator.free_tokens, self._rooms.allocator.capacity_tokens
        longest = sum(max(0, one.max_total_tokens - one.reserved_tokens) for one in self._running)
        self._limit.update(
            1 - free / every if every else 1.0,
            len(self._running),
            at_risk=longest > free,
            sent_back=sent_back,
        )

    # Who is admitted

    def _admit(self) -> None:
        shared = cache(self._rooms.shared)
        while not self._full or not self._running:
            crowded = len(self._running) >= self._limit.most
            if crowded and not self._below(self._waiting.priority):
                return
            sequence = self._waiting.head(self._is_ready, shared)
            if sequence is None:
                return
            if crowded:
                if not self._make_way(sequence, crowded=True):
                    return
                continue
            try:
                entered = self._enter(sequence)
            except HMTError as error:
                sequence.fail(error)
                self.retire(sequence)
                continue
            if entered:
                self._begin(sequence)
                self._begin_answer(sequence)
            elif not self._make_way(sequence):
                self._full = True
                return

    def _enter(self, sequence: SequenceState) -> bool:
        """Take room for a sequence, and its leader's prompt if that is held; whether there was."""
        leader, positions, spare = sequence.prefix_leader, self._expected(sequence), self._spare()
        if leader is not None and leader.prompt_end is not None:
            if not self._rooms.fork(leader, sequence, positions, spare):
                return False
            sequence.prompt_end = leader.prompt_end
        elif not self._rooms.enter(sequence, positions, spare):
            return False
        elif leader is not None:  # it will compute the prompt, and the others wait for it
            for other in self._choices.followers(leader):
                other.prefix_leader = sequence
        sequence.prefix_leader = None
        return True

    def _begin_answer(self, sequence: SequenceState) -> None:
        """The first token of a sequence whose prompt another has computed to the end."""
        end = sequence.prompt_end
        if end is None or sequence.computed < len(sequence.tokens):
            return
        if not self._allocator.can_rewind():
            sequence.prompt_end = None  # what it appends next takes the prompt from it
        self._begin_first(sequence, end)
        if sequence.finished:
            self.retire(sequence)

    def _make_way(self, head: SequenceState, *, crowded: bool = False) -> bool:
        """Let others give way to `head`, which cannot begin; whether one of them did.

        Who runs does so for a higher priority only.  Who was put aside also does when nothing runs.

        crowded   since as many run as may, and not since there is no room
        """
        lower = self._below(head.priority)
        aside = [one for one in self._put_aside() if one is not head]
        if self._running:
            aside = [one for one in aside if one.priority < head.priority]
        free = self._allocator.free_tokens
        needed = self._expected(head) + self._spare() - head.reserved_tokens
        if self._running and free + sum(one.reserved_tokens for one in (*aside, *lower)) < needed:
            return False  # it would be in vain
        if aside and needed > free and not crowded:
            self._drop(aside[0])
        elif lower:
            # Else too few device pages are left for running sequences, or places in a step.
            self._send_back(lower[0], park=crowded or needed <= free)
        elif not self._running and (aside or head.kv is not None):
            self._drop(aside[0] if aside else head)
        else:
            return False
        return True

    def _below(self, priority: int | None) -> list[SequenceState]:
        """Those that run and can be sent back for one of this priority, who rank lowest first."""
        if priority is None:
            return []
        lower = [one for one in self._running if one.priority < priority]
        return sorted((one for one in lower if not one.stays), key=by_rank, reverse=True)

    def _is_ready(self, sequence: SequenceState) -> bool:
        """False while another computes its prompt, or while others need what it keeps of it."""
        leader = sequence.prefix_leader
        if leader is not None:
            return leader.prompt_end is not None or leader not in self._running
        keeps = sequence.prompt_end is not None and not self._allocator.can_rewind()
        return not (keeps and self._choices.followers(sequence))

    def _begin(self, sequence: SequenceState) -> None:
        self._places[sequence.number] = self._waiting.take(sequence)
        if sequence.admitted_s is None:
            sequence.cached_tokens = sequence.computed
            sequence.admitted_s = time.perf_counter()
        self._running.append(sequence)

    def _expected(self, sequence: SequenceState) -> int:
        """Positions that a sequence is expected to take, or that are reserved for it anyway."""
        if sequence.stays or sequence.fixed_length:
            return sequence.max_total_tokens
        prompt, tokens = sequence.prompt_tokens, len(sequence.tokens)
        longest = sequence.max_total_tokens - prompt
        answer = self._forecast.expected(sequence.owner, longest, tokens - prompt)
        return min(sequence.max_total_tokens, max(prompt + answer, tokens + PAGE_TOKENS))

    def _spare(self) -> int:
        """Positions to be left free for those that run: a page of each that may grow."""
        return PAGE_TOKENS * sum(
            one.reserved_tokens < one.max_total_tokens for one in self._running
        )
