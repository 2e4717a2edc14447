"""Where recurrent state is kept for sequences that begin alike: copies at borders of pages.

Numbers only: the bytes are a StateStore's.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment
from hmt.kvcache.page_table import Ints
from hmt.kvcache.sequence_slots import SequenceSlots

INTERVAL_TOKENS = 1024  # between copies within a prompt, where steps are not larger
_ENDS = 3  # of a conversation: its last prompt and answer, and the answer before
# A copy at an end counts as if its neighbours were so many times further apart than copies are on
# the average: most prompts go on from one.
_END_SPANS = 4


def checkpoint_interval(chunk: int) -> int:
    """Positions between copies of a sequence, at their multiples, where a step has `chunk` tokens.

    No fewer, since a step makes its copy before it begins: steps would have to be cut.
    """
    return max(INTERVAL_TOKENS, round_up(chunk, PAGE_TOKENS))


@dataclass(slots=True, eq=False)
class _Copy:
    """The state behind `position` tokens.

    of_prompt   of a sequence that runs: no longer replaced by one further on
    at_end      of a prompt, or of all
    before      page behind which the copy before it is, of copies of ended sequences; -1: none
    used        when it or one behind it was used last, counted in sequences that ended
    """

    slot: int
    position: int
    of_prompt: bool
    at_end: bool
    used: int
    before: int = -1


class StateCheckpoints:
    """Copies of states in spare slots, each of which belongs to a position of a running sequence.

    When a sequence ends, its copies belong to the pages that end at their positions: a page of a
    PrefixTree holds one beginning, so the state behind it is that of the beginning.  A sequence
    that runs has a copy at the last border of a page within its prompt, one at the last border of
    all, and one at each multiple of the interval.

    Where no slot is free, the copy goes whose neighbours are closest to each other, since that is
    what is computed again at most without it.  Those where a conversation ended count as if theirs
    were further apart, and those that were not used for long as if closer.  So copies of one
    conversation become sparser evenly: n of them over L tokens are about 2 L / n apart at most.
    Only for the engine's thread.
    """

    def __init__(self, slots: SequenceSlots, interval: int = INTERVAL_TOKENS) -> None:
        """In spare ones of `slots`, which are given up when sequences that run need them."""
        self._slots = slots
        self._interval = interval
        slots.copies = self
        self._running: dict[int, dict[int, _Copy]] = {}  # by sequence, and by position
        self._began: dict[int, int] = {}  # by sequence: the position whose state it was given
        self._kept: dict[int, _Copy] = {}  # by page
        self._ended = 0  # sequences

    @property
    def kept(self) -> int:
        """Copies of sequences that have ended."""
        return len(self._kept)

    @property
    def in_use(self) -> int:
        """Implements SlotCopies."""
        return len(self._kept) + sum(map(len, self._running.values()))

    def give_up_one(self) -> None:
        """Implements SlotCopies: the one that is worth least."""
        _, owner, key = min(self._worths())
        self._give_up(owner, key)

    def began_at(self, sequence: int, position: int) -> None:
        """A new sequence was given the state behind `position`, of which others have a copy."""
        self._began[sequence] = position

    def take(self, run: Segment) -> int | None:
        """A slot for the state with which `run` begins; None where it is not worth one.

        Copies of the sequence that it replaces are given up.
        """
        if not run.start or run.start % PAGE_TOKENS:
            return None
        held = self._running.setdefault(run.sequence, {})
        if run.start in held or run.start == self._began.get(run.sequence):
            return None
        border = (run.rotated - 1) // PAGE_TOKENS * PAGE_TOKENS
        of_prompt = run.start <= border
        if of_prompt and run.start != border and run.start % self._interval:
            return None
        last = held.get(max(held, default=0))
        if last is not None and not last.of_prompt:
            last.at_end = False
            if last.position % self._interval:
                self._give(held.pop(last.position))
        at_end = not of_prompt or run.start == border
        return self._add(run.sequence, _Copy(-1, run.start, of_prompt, at_end, self._ended))

    def take_read(self, sequence: int, position: int) -> int | None:
        """A slot for a state that a new sequence was given from the disk; None: there is none.

        The next one with this beginning then need not read it again.
        """
        return self._add(sequence, _Copy(-1, position, True, True, self._ended))

    def take_back(self, sequence: int, position: int) -> None:
        """The state behind `position` of a running sequence was not copied after all."""
        copy = self._running.get(sequence, {}).pop(position, None)
        if copy is not None:
            self._give(copy)

    def longest(self, pages: Ints) -> int:
        """How many of the first `pages` of a sequence end with a state that is kept."""
        for count in range(len(pages), 0, -1):
            if int(pages[count - 1]) in self._kept:
                return count
        return 0

    def kept_behind(self, pages: Ints) -> list[tuple[int, int]]:
        """(number, slot) of those of `pages` that have a copy, in order."""
        numbered = enumerate(pages.tolist())
        return [(number, self._kept[page].slot) for number, page in numbered if page in self._kept]

    def slot_behind(self, page: int) -> int:
        """The slot with the state behind `page`; this is a use of it."""
        copy = self._kept[page]
        copy.used = self._ended
        return copy.slot

    def keep(self, sequence: int, pages: Ints) -> None:
        """A sequence ends: its copies belong to `pages`, the first of it, those that are held."""
        self._ended += 1
        self._began.pop(sequence, None)
        copies = self._running.pop(sequence, {})
        last = max(copies, default=0)
        for position, copy in copies.items():
            number = position // PAGE_TOKENS - 1
            page = int(pages[number]) if number < len(pages) else -1
            if page < 0 or page in self._kept:
                self._give(copy)
            else:
                copy.at_end |= position == last
                self._kept[page] = copy
        path = [page for page in pages.tolist() if page in self._kept]
        for page, before in zip(path, [-1, *path], strict=False):
            self._kept[page].before, self._kept[page].used = before, self._ended
        for page in [page for page in path if self._kept[page].at_end][:-_ENDS]:
            self._kept[page].at_end = False

    def forget_pages(self, pages: Ints) -> None:
        """No prefix holds `pages` any more."""
        for page in pages.tolist():
            if page in self._kept:
                self._forget(page)

    def forget_all_but(self, sequences: Set[int]) -> None:
        """Other sequences have been closed without `keep`."""
        for sequence in self._running.keys() - sequences:
            for copy in self._running.pop(sequence).values():
                self._give(copy)
        for sequence in self._began.keys() - sequences:
            del self._began[sequence]

    def _add(self, sequence: int, copy: _Copy) -> int | None:
        """Give a copy of a running sequence a slot, if it is worth more than another that has."""
        held = self._running.setdefault(sequence, {})
        if not self._slots.spare_free and not self._make_room(sequence, copy):
            return None
        slot = self._slots.take_spare()
        assert slot is not None
        copy.slot = slot
        held[copy.position] = copy
        return slot

    def _give(self, copy: _Copy) -> None:
        self._slots.give_spare(copy.slot)

    def _forget(self, page: int) -> None:
        """Give up the copy behind `page`; those behind it follow the one before it."""
        gone = self._kept.pop(page)
        for copy in self._kept.values():
            if copy.before == page:
                copy.before = gone.before
        self._give(gone)

    def _make_room(self, sequence: int, new: _Copy) -> bool:
        """Give up the copy that is worth least, if that is less than `new` of `sequence` is."""
        if not self.in_use:
            return False
        worth, owner, key = min(self._worths())
        before = max(self._running[sequence], default=self._began.get(sequence, 0))
        if not new.at_end and worth >= self._worth(new, before, new.position):
            return False
        self._give_up(owner, key)
        return True

    def _give_up(self, owner: int, key: int) -> None:
        """A copy of a running sequence at a position, or, where `owner` is 0, of a page."""
        if owner:
            self._give(self._running[owner].pop(key))
        else:
            self._forget(key)

    def _worths(self) -> Iterator[tuple[float, int, int]]:
        """(worth, sequence, position) of each copy; of ended sequences (worth, 0, page)."""
        furthest: dict[int, int] = {}  # of the copies that follow that of a page
        for copy in self._kept.values():
            furthest[copy.before] = max(furthest.get(copy.before, 0), copy.position)
        for page, copy in self._kept.items():
            before = self._kept.get(copy.before)
            start, end = before.position if before else 0, furthest.get(page, copy.position)
            yield self._worth(copy, start, end), 0, page
        for sequence, copies in self._running.items():
            start, positions = self._began.get(sequence, 0), sorted(copies)
            for position, end in zip(positions, [*positions[1:], *positions[-1:]], strict=True):
                yield self._worth(copies[position], start, end), sequence, position
                start = position

    def _worth(self, copy: _Copy, before: int, after: int) -> float:
        """How far the copies around it are apart, by how likely it is that one is wanted."""
        spans = _END_SPANS if copy.at_end else 0
        more = spans * (self._interval + copy.position // self._slots.spare)
        if after == copy.position and copy.of_prompt and not copy.at_end:
            more = self._interval  # its sequence goes on at least as far
        return (after - before + more) / (1 + self._ended - copy.used)
