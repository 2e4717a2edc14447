"""Several answers to one prompt: which sequence holds its KV for those that cannot begin yet."""

from collections.abc import Iterable
from collections.abc import Sequence as Many

from hmt.base.errors import HMTError
from hmt.engine.scheduling.kv_reservation import KVReservation
from hmt.engine.scheduling.sequence import SequenceState


class Choices:
    """Finds for sequences whose `leader` has computed the prompt one that still holds its KV.

    Every sequence with a `prompt_end` does.  Where caches can rewind, those are all that run; else,
    since these forget it, one that waits and has a copy.  Only for the engine's thread.
    """

    def __init__(
        self,
        rooms: KVReservation,
        waiting: Iterable[SequenceState],
        running: Iterable[SequenceState],
    ) -> None:
        """Of one scheduler, whose `waiting` and `running` are looked at when asked."""
        self._rooms = rooms
        self._waiting, self._running = waiting, running

    def followers(self, leader: SequenceState) -> list[SequenceState]:
        """Those that wait for the prompt of `leader`, or for a place to go on with it."""
        return [one for one in self._waiting if one.prefix_leader is leader]

    def source(
        self, leader: SequenceState, waiting: Many[SequenceState], places: int
    ) -> SequenceState | None:
        """Which sequence holds the prompt for those of `waiting` that get no place; None: none can.

        places   for sequences to run; there may be room for fewer
        """
        if self._rooms.allocator.can_rewind():
            return leader
        if not waiting or len(waiting) <= places:  # more may run than the limit now allows
            return None
        try:  # the last has all others before it, so all have copied it when that begins
            return waiting[-1] if self._rooms.copy_prompt(leader, waiting[-1]) else None
        except HMTError:
            return None

    def release(self, sequence: SequenceState, *, ended: bool) -> None:
        """Before a sequence gives up its KV pages: let its followers have the prompt.

        Of another that holds it; else, if it has `ended`, the first follower takes it over.  Where
        none holds it, the sequence that begins next computes it.
        """
        end, sequence.prompt_end = sequence.prompt_end, None
        followers = self.followers(sequence)
        if end is None or not followers:
            return
        every = [*self._running, *self._waiting]
        heir = next((one for one in every if one.prompt_end is end and not one.finished), None)
        holds = self._rooms.allocator.can_rewind() or sequence.computed == sequence.prompt_tokens
        if heir is None and ended and holds:
            try:
                self._rooms.hand_over_prompt(sequence, followers[0])
            except HMTError:
                return
            heir, followers[0].prompt_end = followers[0], end
        for one in followers if heir is not None else ():
            one.prefix_leader = None if one is heir else heir
