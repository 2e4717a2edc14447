"""What sequences hold of the KV cache: taken, grown, put aside, given back."""

from collections.abc import Callable

from hmt.base.errors import DiskReadError
from hmt.base.log import logger
from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.engine.scheduling.kv_operations import KVOperationLog
from hmt.engine.scheduling.sequence import SequenceState
from hmt.kvcache.prefix import PrefixCache


class KVReservation:
    """Keeps `kv`, `room` and `computed` of sequences.  Only for the engine's thread.

    allocator   of `kv`, for questions
    """

    def __init__(
        self, kv: KVOperationLog, prefixes: PrefixCache | None, salt: Callable[[SequenceState], str]
    ) -> None:
        self._kv = kv
        self.allocator = kv.allocator
        self._prefixes = prefixes
        self._salt = salt

    def enter(self, sequence: SequenceState, positions: int, spare: int) -> bool:
        """Reserve `positions` for a sequence that does not run, if `spare` others stay free.

        What is in memory of its tokens counts as computed.  Raises DiskReadError where more of them
        is on the disk.
        """
        if sequence.kv is not None:
            if not self.allocator.can_resume(sequence.kv, positions + spare):
                return False
            self._kv.resume(sequence.kv, positions)
        elif self._prefixes is None:
            if not self.allocator.can_open(positions + spare):
                return False
            sequence.kv = self._kv.open(positions)
        else:
            salt = self._salt(sequence)
            # What is held is not computed, and has nothing to show.
            tokens = sequence.content(len(sequence.tokens))
            tokens = [] if sequence.has_prompt_outputs else tokens
            opened = self._prefixes.open(positions, tokens, salt, spare=spare)
            if opened is None:
                return False
            sequence.kv, sequence.computed = opened.sequence, opened.held
            if tokens and sequence.admitted_s is None:
                sequence.diverged_at = opened.diverged_at
        sequence.reserved_tokens = max(sequence.reserved_tokens, round_up(positions, PAGE_TOKENS))
        return True

    def fork(
        self, leader: SequenceState, sequence: SequenceState, positions: int, spare: int
    ) -> bool:
        """Let a sequence begin with the prompt that `leader` holds, if `spare` others stay free."""
        assert leader.kv is not None
        prompt = sequence.prompt_tokens
        if not self.allocator.can_fork(leader.kv, prompt, positions + spare):
            return False
        sequence.kv = self._kv.fork(leader.kv, prompt, positions)
        sequence.computed = prompt
        sequence.reserved_tokens = round_up(positions, PAGE_TOKENS)
        return True

    def copy_prompt(self, leader: SequenceState, sequence: SequenceState) -> bool:
        """Let a sequence that waits hold the prompt of `leader`, if there is room."""
        if not self.fork(leader, sequence, sequence.prompt_tokens, 0):
            return False
        assert sequence.kv is not None
        self._kv.park(sequence.kv)
        return True

    def hand_over_prompt(self, leader: SequenceState, sequence: SequenceState) -> None:
        """Take the prompt from `leader`, which has ended, for a sequence that waits.

        Raises BudgetError or DiskReadError, changing no more than what `leader` can go on with.
        """
        assert leader.kv is not None
        if leader.computed > sequence.prompt_tokens:
            # Whole pages of it are left where that fails.
            leader.computed = sequence.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
            self._kv.rewind(leader.kv, sequence.prompt_tokens)
        self._kv.park(leader.kv)
        sequence.kv, sequence.computed = leader.kv, sequence.prompt_tokens
        sequence.reserved_tokens = round_up(sequence.prompt_tokens, PAGE_TOKENS)
        leader.kv, leader.reserved_tokens = None, 0

    def grow(self, sequence: SequenceState, positions: int) -> bool:
        """Let a sequence have so many positions, if there is room."""
        assert sequence.kv is not None
        if not self.allocator.can_grow(sequence.kv, positions):
            return False
        self._kv.grow(sequence.kv, positions)
        sequence.reserved_tokens = max(sequence.reserved_tokens, round_up(positions, PAGE_TOKENS))
        return True

    def shrink(self, sequence: SequenceState, pages: int) -> bool:
        """Take back up to `pages` that a sequence has reserved and not begun; whether it had any.

        What it chose last has its place still.
        """
        assert sequence.kv is not None
        least = round_up(len(sequence.tokens), PAGE_TOKENS)
        room = max(least, sequence.reserved_tokens - pages * PAGE_TOKENS)
        if room >= sequence.reserved_tokens:
            return False
        self._kv.shrink(sequence.kv, room)
        sequence.reserved_tokens = room
        return True

    def park(self, sequence: SequenceState) -> None:
        """Leave a sequence no more than what it has computed, wherever that moves meanwhile."""
        assert sequence.kv is not None
        self._kv.shrink(sequence.kv, sequence.computed)
        self._kv.park(sequence.kv)
        sequence.reserved_tokens = round_up(sequence.computed, PAGE_TOKENS)

    def drop(self, sequence: SequenceState, *, others_need: bool = True) -> None:
        """Take everything from a sequence that will go on; what others do not need is left to it.

        That is what the prefix cache still has when it comes back; the rest is computed again.
        Where that is on a disk, it has all but a page, unless the sequence needs none of it.
        """
        assert sequence.kv is not None
        if self._prefixes is None:
            self._kv.close(sequence.kv)
        else:
            computed = sequence.content(sequence.computed)
            leave = self._prefixes.set_aside if others_need else self._prefixes.leave
            try:
                leave(sequence.kv, computed, self._salt(sequence), sequence.owner)
            except DiskReadError as error:
                logger.warning("a sequence that gave way could not be kept: %s", error)
        sequence.kv, sequence.reserved_tokens, sequence.computed = None, 0, 0

    def close(self, sequence: SequenceState) -> None:
        """Free what an ended sequence holds, if it holds anything."""
        if sequence.kv is None:
            return
        if self._prefixes is None:
            self._kv.close(sequence.kv)
        else:
            computed = sequence.content(sequence.computed)
            salt, owner = self._salt(sequence), sequence.owner
            self._prefixes.close(sequence.kv, computed, salt, owner)
        sequence.kv, sequence.reserved_tokens = None, 0

    def shared(self, sequence: SequenceState) -> int:
        """Tokens of a sequence that waits whose KV is in memory."""
        if sequence.kv is not None:
            return sequence.computed
        if self._prefixes is None or sequence.has_prompt_outputs:
            return 0
        tokens = sequence.content(len(sequence.tokens))
        return self._prefixes.shared(tokens, self._salt(sequence))
