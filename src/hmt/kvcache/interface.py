"""What an allocator asks of others: of those that hold bytes, and of those that keep prefixes."""

from dataclasses import dataclass
from typing import Protocol

from hmt.kvcache.page_table import Ints


class KVStorage(Protocol):
    """The bytes of all pages, or of some layers' part of them.  For the engine's thread."""

    def copy_page(self, page: Ints, to: Ints) -> None:
        """Let page `to`, which lies where layers compute, hold what `page` holds, wherever it lies.

        Both int64 [1].  Raises DiskReadError.
        """
        ...

    def copy_slots(self, sequence: int, to: int) -> None:
        """Let a new sequence hold in its SequenceSlots what another one holds there."""
        ...

    def rollback(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold no more than `tokens` positions; the others were drafts."""
        ...

    def pages_made(self, ids: Ints) -> None:
        """Pages `ids` (int64) are new; whatever was known of these ids is of other pages."""
        ...


class SharedPrefixes(Protocol):
    """Owns one share of each page of ended sequences; a PrefixTree."""

    def alone(self) -> Ints:
        """Pages that it alone owns."""
        ...

    def evict(self, pages: int) -> int:
        """Give up shares until so many more pages are free; how many are."""
        ...


@dataclass(slots=True, eq=False)
class SequencePages:
    """What one sequence holds.

    pages    ids by position, of pages that have a place.  Replaced and never changed in place, so
             BlockTables sees by identity whether its table of them is still right
    unmade   pages that are reserved besides and have no place yet
    tokens   positions that steps have filled, where pages move
    parked   takes no part in steps
    """

    pages: Ints
    unmade: int
    tokens: int = 0
    parked: bool = False
