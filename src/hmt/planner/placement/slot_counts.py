"""How many slots of each size: so that blocks take each other's place, and no memory is cut up."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hmt.contracts.blocks import BlockKind, BlockSize

_AT_LEAST = 2  # one is read while another is used
_MOST_SIZES = 16  # with more, most of the memory would wait for its size to come again


def slot_counts(streamed: Sequence[BlockSize], slots_bytes: int) -> Mapping[int, int]:
    """Slots by size, for blocks that come and go in `slots_bytes`; empty where sizes must share.

    Dense blocks are used in a circle, so each size gets the same share of it, as near as can be:
    then the blocks in memory are about as many stages long, whatever their sizes.  Beside experts,
    whose number decides how often they are found, dense blocks get half of the bytes at most.
    Without that a small block takes a part of a large one's place, which then is nowhere in one
    piece: a sixth of the time went into making and giving back such places; the disk ran at 80%.
    Where not every size can have two, one of each does: see `_alternating`.
    """
    dense = Counter(b.slot_bytes for b in streamed if b.id.kind is not BlockKind.EXPERT)
    experts = Counter(b.slot_bytes for b in streamed if b.id.kind is BlockKind.EXPERT)
    sizes = set(dense) | set(experts)
    if len(sizes) > _MOST_SIZES or set(dense) & set(experts) or len(experts) > 1:
        return {}
    counts = {size: min(_AT_LEAST, count) for size, count in (dense + experts).items()}
    room = slots_bytes - _bytes(counts)
    if room < 0:
        return {} if experts else _alternating(dense, slots_bytes)
    dense_room = room if not experts else max(0, slots_bytes // 2 - _bytes(counts))
    room -= _share_out(counts, dense, dense_room)
    _share_out(counts, experts, room)
    return counts


def _alternating(dense: Mapping[int, int], slots_bytes: int) -> dict[int, int]:
    """Slots for blocks of which one is read while one of another size is used.

    Blocks so small that their size has none take those of the next one; empty where not two sizes
    fit.  Where sizes shared a layer's memory, a network was not read before its attention had been
    computed, whose place lay in the middle: a prompt of 1.8 s waited for 0.22 s instead of 0.06.
    """
    counts = dict.fromkeys(sorted(dense, reverse=True), 1)
    while _bytes(counts) > slots_bytes:
        counts.popitem()
    if len(counts) < _AT_LEAST:
        return {}
    _share_out(counts, {size: dense[size] for size in counts}, slots_bytes - _bytes(counts))
    return counts


def _share_out(counts: dict[int, int], blocks: Mapping[int, int], room: int) -> int:
    """Add slots while there is `room`, to the size that has the least of its blocks; bytes used."""
    begin = room
    while growing := [s for s in blocks if counts[s] < blocks[s] and s <= room]:
        size = min(growing, key=lambda s: (counts[s] / blocks[s], -s))
        counts[size] += 1
        room -= size
    return begin - room


def _bytes(counts: Mapping[int, int]) -> int:
    return sum(size * count for size, count in counts.items())
