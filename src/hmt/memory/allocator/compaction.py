"""Which buffers to move so that free pages come to lie in one piece.  Pure functions."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_TRIED = 16  # windows whose pieces are tried for other places, cheapest first


class MovableRegion(NamedTuple):
    """Pages in use: [start, start + pages)."""

    start: int
    pages: int
    movable: bool

    @property
    def end(self) -> int:
        """The first page behind it."""
        return self.start + self.pages


class Move(NamedTuple):
    """A piece of `pages` pages goes from page `source` to page `target`; the two may overlap."""

    source: int
    target: int
    pages: int


class Run(NamedTuple):
    """Free pages: [start, end)."""

    start: int
    end: int


def plan_moves(pieces: Sequence[MovableRegion], pages: int, wanted: int) -> list[Move] | None:
    """Moves, in order, after which `wanted` adjacent pages of `pages` are free; None: impossible.

    `pieces` by address.  Of two ways the one that moves fewer pages: a window is cleared, its
    pieces going to holes elsewhere (at most about `wanted` pages move, however much is in use), or
    pieces between neighbouring holes slide together (possible also where no hole holds a piece).
    """
    free = free_runs(pieces, pages)
    plans = (_clear_window(pieces, free, pages, wanted), _slide(pieces, free, wanted))
    return min((plan for plan in plans if plan is not None), key=moved_pages, default=None)


def moved_pages(moves: Sequence[Move]) -> int:
    """Pages that are copied."""
    return sum(move.pages for move in moves)


def free_runs(pieces: Sequence[MovableRegion], pages: int) -> list[Run]:
    """What `pieces`, by address, leave free of `pages`."""
    ends = [0, *(piece.end for piece in pieces)]
    starts = [*(piece.start for piece in pieces), pages]
    return [Run(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _clear_window(
    pieces: Sequence[MovableRegion], free: Sequence[Run], pages: int, wanted: int
) -> list[Move] | None:
    """Clear `wanted` pages that begin or end with a free run."""
    starts, ends = [piece.start for piece in pieces], [piece.end for piece in pieces]
    used = [0, *accumulate(piece.pages for piece in pieces)]
    fixed = [0, *accumulate(not piece.movable for piece in pieces)]
    windows = []
    for begin in {run.start for run in free} | {run.end - wanted for run in free}:
        if 0 <= begin <= pages - wanted:
            first, last = bisect_right(ends, begin), bisect_left(starts, begin + wanted)
            if fixed[first] == fixed[last]:
                windows.append((used[last] - used[first], begin, first, last))
    for _, begin, first, last in sorted(windows)[:_TRIED]:
        holes = _outside(free, begin, begin + wanted)
        moves = _into_holes(pieces[first:last], holes)
        if moves is not None:
            return moves
    return None


def _outside(free: Sequence[Run], begin: int, end: int) -> list[Run]:
    """Free runs without what lies in [begin, end)."""
    left = [Run(run.start, min(run.end, begin)) for run in free if run.start < begin]
    right = [Run(max(run.start, end), run.end) for run in free if run.end > end]
    return left + right


def _into_holes(pieces: Sequence[MovableRegion], holes: list[Run]) -> list[Move] | None:
    """Each piece, largest first, into the tightest hole that holds it."""
    moves = []
    for piece in sorted(pieces, key=lambda piece: -piece.pages):
        fitting = [hole for hole in holes if hole.end - hole.start >= piece.pages]
        if not fitting:
            return None
        hole = min(fitting, key=lambda hole: (hole.end - hole.start, hole.start))
        holes.remove(hole)
        if hole.end - hole.start > piece.pages:
            holes.append(Run(hole.start + piece.pages, hole.end))
        moves.append(Move(piece.start, hole.start, piece.pages))
    return moves


def _slide(pieces: Sequence[MovableRegion], free: Sequence[Run], wanted: int) -> list[Move] | None:
    """Push the pieces between some neighbouring holes down to the first of them."""
    starts = [piece.start for piece in pieces]
    best: tuple[int, int, int] | None = None  # pages moved, first hole, last hole
    first = gathered = 0
    for last, hole in enumerate(free):
        # Everything between holes `last - 1` and `last` must be movable.
        if last and not all(p.movable for p in _between(pieces, starts, free[last - 1], hole)):
            first, gathered = last, 0
        gathered += hole.end - hole.start
        while gathered - (free[first].end - free[first].start) >= wanted:
            gathered -= free[first].end - free[first].start
            first += 1
        if gathered >= wanted:
            moved = hole.end - free[first].start - gathered
            best = min(best or (moved, first, last), (moved, first, last))
    if best is None:
        return None
    _, first, last = best
    target, moves = free[first].start, []
    for piece in _between(pieces, starts, free[first], free[last]):
        moves.append(Move(piece.start, target, piece.pages))
        target += piece.pages
    return moves


def _between(
    pieces: Sequence[MovableRegion], starts: Sequence[int], low: Run, high: Run
) -> Sequence[MovableRegion]:
    return pieces[bisect_left(starts, low.end) : bisect_left(starts, high.start)]
