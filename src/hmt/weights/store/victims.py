"""Which cached blocks make room for another one."""

from collections.abc import Iterable

from hmt.contracts.store import Priority
from hmt.weights.store.block_state import BlockState


def choose_victims(
    coldest_first: Iterable[BlockState], nbytes: int, priority: Priority, *, force: bool
) -> list[BlockState]:
    """Blocks that free `nbytes`, and at least one, in the order in which they should go.

    None when all that may go are too few: that would empty the cache for nothing.  Leased blocks
    never go, awaited ones only when no others are left: those that were guessed for anything that
    was not, the others with `force`, which somebody has who waits.  Looks no further along
    `eviction_order` than it must.
    """
    victims: list[BlockState] = []
    awaited: list[BlockState] = []
    for entry in coldest_first:
        if entry.leases:
            continue
        if entry.awaited is not None:
            awaited.append(entry)
            continue
        victims.append(entry)
        nbytes -= entry.layout.slot_bytes
        if nbytes <= 0:
            return victims
    guessed = [entry for entry in awaited if entry.awaited is Priority.SPECULATIVE]
    surely = [entry for entry in awaited if entry.awaited is not Priority.SPECULATIVE]
    for entry in (guessed if priority is not Priority.SPECULATIVE else []) + (
        surely if force else []
    ):
        victims.append(entry)
        nbytes -= entry.layout.slot_bytes
        if nbytes <= 0:
            return victims
    return []
