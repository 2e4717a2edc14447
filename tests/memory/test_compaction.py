"""Plans of moves, carried out on an array that stands for memory."""

from hypothesis import given
from hypothesis import strategies as st

from hmt.memory.allocator.compaction import MovableRegion, free_runs, moved_pages, plan_moves

FREE = -1


@st.composite
def layouts(draw: st.DrawFn, *, fixed: bool = True) -> tuple[list[MovableRegion], int]:
    """Pieces in any places among some pages."""
    pieces, end = [], 0
    for _ in range(draw(st.integers(0, 12))):
        start = end + draw(st.integers(0, 5))
        pieces.append(
            MovableRegion(start, draw(st.integers(1, 6)), not fixed or draw(st.booleans()))
        )
        end = pieces[-1].end
    return pieces, end + draw(st.integers(0, 5))


def memory_of(pieces: list[MovableRegion], pages: int) -> list[int]:
    """The number of the piece that is there, for each page."""
    memory = [FREE] * pages
    for number, piece in enumerate(pieces):
        memory[piece.start : piece.end] = [number] * piece.pages
    return memory


@given(layouts(), st.integers(1, 20))
def test_moves_bring_free_pages_together_and_overwrite_nothing(
    layout: tuple[list[MovableRegion], int], wanted: int
) -> None:
    pieces, pages = layout
    moves = plan_moves(pieces, pages, wanted)
    if moves is None:
        return
    memory = memory_of(pieces, pages)
    by_place = {piece.start: number for number, piece in enumerate(pieces)}
    for source, target, length in moves:
        number = by_place.pop(source)
        assert pieces[number].movable and pieces[number].pages == length
        there = memory[target : target + length]
        assert len(there) == length and set(there) <= {FREE, number}, "somebody else is there"
        memory[source : source + length] = [FREE] * length
        memory[target : target + length] = [number] * length
        by_place[target] = number
    assert any(
        memory[first : first + wanted] == [FREE] * wanted for first in range(pages - wanted + 1)
    )
    for number, piece in enumerate(pieces):
        assert memory.count(number) == piece.pages


@given(layouts(), st.integers(1, 20))
def test_a_plan_is_found_wherever_pieces_can_slide_together(
    layout: tuple[list[MovableRegion], int], wanted: int
) -> None:
    pieces, pages = layout
    fixed = [piece for piece in pieces if not piece.movable]
    borders = [0, *(edge for piece in fixed for edge in (piece.start, piece.end)), pages]
    memory = memory_of(pieces, pages)
    gaps = zip(borders[::2], borders[1::2], strict=True)
    if any(memory[first:end].count(FREE) >= wanted for first, end in gaps):
        assert plan_moves(pieces, pages, wanted) is not None


@given(layouts(fixed=False), st.integers(1, 20))
def test_what_fits_already_moves_nothing(
    layout: tuple[list[MovableRegion], int], wanted: int
) -> None:
    pieces, pages = layout
    if any(run.end - run.start >= wanted for run in free_runs(pieces, pages)):
        assert plan_moves(pieces, pages, wanted) == []


@given(st.integers(1, 50), st.integers(1, 8), st.data())
def test_equal_slots_move_no_more_than_is_wanted(
    slots: int, several: int, data: st.DataObject
) -> None:
    """Where every hole holds any piece, the work does not grow with the size of the cache."""
    used = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    pieces = [MovableRegion(7 * slot, 7, True) for slot in range(slots) if used[slot]]
    if used.count(False) >= several:
        moves = plan_moves(pieces, 7 * slots, 7 * several)
        assert moves is not None and moved_pages(moves) < 7 * several
