"""Which cached blocks make room for another one."""

from collections.abc import Iterable

from hmt.contracts.store import Priority
from hmt.weights.entry import Entry


def choose_victims(
    coldest_first: Iterable[Entry], nbytes: int, priority: Priority, *, force: bool
) -> list[Entry]:
    """Blocks that free `nbytes`, and at least one, in the order in which they should go.

    None when all that may go are too few: that would empty the cache for nothing.  Leased blocks
    never go, awaited ones only when no others are left: those that were guessed for anything that
    was not, the others with `force`, which somebody has who waits.  Looks no further along
    `coldest_first` than it must.
    """
    victims: list[Entry] = []
    awaited: list[Entry] = []
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
    guessed = [entry for entry in awaited if entry.awaited is Priority.GUESS]
    surely = [entry for entry in awaited if entry.awaited is not Priority.GUESS]
    for entry in (guessed if priority is not Priority.GUESS else []) + (surely if force else []):
        victims.append(entry)
        nbytes -= entry.layout.slot_bytes
        if nbytes <= 0:
            return victims
    return []
