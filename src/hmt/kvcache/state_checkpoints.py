"""Where recurrent state is kept for sequences that begin alike: copies at borders of pages.

Numbers only: the bytes are a StateStore's.
"""

from collections.abc import Set

from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment
from hmt.kvcache.page_table import Ints
from hmt.memory import Bitmap

INTERVAL_TOKENS = 1024  # of a long sequence, positions at which a checkpoint is not replaced


class StateCheckpoints:
    """Slots for copies of states, of which each belongs to a position of a running sequence.

    When a sequence ends, its copies belong to the pages that end at their positions: a page of a
    PrefixTree holds one beginning, so the state behind it is that of the beginning.  A sequence
    that runs has a copy at the last border of a page within its prompt, one at the last border of
    all, and one every INTERVAL_TOKENS.  Where no slot is free, the copy that was not used for the
    longest time goes.  Only for the engine's thread.
    """

    def __init__(self, first: int, count: int) -> None:
        """Of slots `first` and on."""
        self._first = first
        self._free = Bitmap(count)
        self._running: dict[int, dict[int, int]] = {}  # by sequence: slots by position
        self._kept: dict[int, int] = {}  # by page; what was used last comes last

    @property
    def kept(self) -> int:
        """Copies of sequences that have ended."""
        return len(self._kept)

    def take(self, run: Segment) -> int | None:
        """A slot for the state with which `run` begins; None where it is not worth one.

        Copies of the sequence that it replaces are given up.
        """
        if not run.start or run.start % PAGE_TOKENS:
            return None
        held = self._running.setdefault(run.sequence, {})
        if run.start in held:
            return None
        prompt = run.rotated
        for position in list(held):
            ends_prompt = position < prompt <= run.start
            if position % INTERVAL_TOKENS and not ends_prompt and position >= max(held):
                self._give(held.pop(position))
        if not self._free.free and not self._give_oldest(held):
            return None
        (slot,) = self._free.take(1)
        held[run.start] = self._first + slot
        return held[run.start]

    def longest(self, pages: Ints) -> int:
        """How many of the first `pages` of a sequence end with a state that is kept."""
        for count in range(len(pages), 0, -1):
            if int(pages[count - 1]) in self._kept:
                return count
        return 0

    def kept_behind(self, pages: Ints) -> list[tuple[int, int]]:
        """(number, slot) of those of `pages` that have a copy, in order."""
        numbered = enumerate(pages.tolist())
        return [(number, self._kept[page]) for number, page in numbered if page in self._kept]

    def slot_behind(self, page: int) -> int:
        """The slot with the state behind `page`; this is a use of it."""
        slot = self._kept.pop(page)
        self._kept[page] = slot
        return slot

    def keep(self, sequence: int, pages: Ints) -> None:
        """A sequence ends: its copies belong to `pages`, the first of it, those that are held."""
        for position, slot in self._running.pop(sequence, {}).items():
            number = position // PAGE_TOKENS - 1
            page = int(pages[number]) if number < len(pages) else -1
            if page < 0 or page in self._kept:
                self._give(slot)
            else:
                self._kept[page] = slot

    def forget_pages(self, pages: Ints) -> None:
        """No prefix holds `pages` any more."""
        for page in pages.tolist():
            if (slot := self._kept.pop(page, None)) is not None:
                self._give(slot)

    def forget_all_but(self, sequences: Set[int]) -> None:
        """Other sequences have been closed without `keep`."""
        for sequence in self._running.keys() - sequences:
            for slot in self._running.pop(sequence).values():
                self._give(slot)

    def _give(self, slot: int) -> None:
        self._free.give([slot - self._first])

    def _give_oldest(self, held: dict[int, int]) -> bool:
        """Give up a copy of an ended sequence, else the first of `held`; False if there is none."""
        for copies in (self._kept, held):
            if copies:
                self._give(copies.pop(next(iter(copies))))
                return True
        return False
