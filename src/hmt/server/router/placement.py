"""Which replica answers a request: the one that knows most of its prompt, else the least busy one.

A prompt is known by hashes of its beginnings, every 256 bytes of what a request says.  After the
radix tree of SGLang's router (arXiv 2312.07104), without its tree: a table of hashes, each of all
that comes before, is as good for whole pieces, and bounded by a number of entries.
"""

import enum
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from hmt.server.router.replicas import Replica

_PIECE_BYTES: Final = 256  # some 64 tokens of text, a few pages
_MOST_PIECES: Final = 256  # of one prompt: what differs behind them changes no choice
_MOST_KNOWN: Final = 1 << 17  # hashes, 30 MB
# What a prompt begins with, in the order of chat templates.
_HEADS: Final = ("model", "cache_salt", "tools", "system", "instructions")
_BODIES: Final = ("messages", "input", "prompt", "content")
_ID_DIGITS: Final = 2


class Reason(enum.StrEnum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    LOAD = "load"
    STORED = "stored"


class Placement:
    """Chooses replicas, and remembers which prompts each of them was given.

    slack   requests that a replica may have more than the least busy one before a known prefix
            counts for nothing: as many as it computes at once, or one would wait for its prefix
    """

    def __init__(self, replicas: Sequence[Replica], slack: int) -> None:
        self.replicas = replicas
        self._slack = slack
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def choose(
        self, owner: str, body: Mapping[str, Any], without: Collection[Replica] = ()
    ) -> tuple[Replica, Reason] | None:
        """A replica that runs, for the request `body` of `owner`; None: there is none.

        `without` those that failed it already.
        """
        running = self._running(without)
        if not running:
            return None
        stored = self._of_id(stored_id(body))
        if stored in running:
            return stored, Reason.STORED
        least = min(running, key=lambda one: (one.running, one.taken))
        hashes = list(prefix_hashes(owner, body))
        known = next((self._known[one] for one in reversed(hashes) if one in self._known), None)
        chosen, reason = least, Reason.LOAD
        knows = None if known is None else self.replicas[known]
        if knows in running and knows.running - least.running < self._slack:
            chosen, reason = knows, Reason.PREFIX
        for one in hashes:
            self._known[one] = chosen.number
            self._known.move_to_end(one)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return chosen, reason

    def first(self, without: Collection[Replica] = ()) -> tuple[Replica, Reason] | None:
        """The first replica that runs; None: there is none."""
        return next(((one, Reason.LOAD) for one in self._running(without)), None)

    def _running(self, without: Collection[Replica]) -> list[Replica]:
        return [one for one in self.replicas if not one.failure and one not in without]

    def holder(self, name: str) -> Replica | None:
        """The replica that stores the response called `name`; None where none that runs does."""
        found = self._of_id(name)
        return None if found is None or found.failure else found

    def _of_id(self, name: str) -> Replica | None:
        digits = name.rpartition("_")[2][:_ID_DIGITS]
        try:
            return self.replicas[int(digits, 16)]
        except (ValueError, IndexError):
            return None


def stored_id(body: Mapping[str, Any]) -> str:
    """What a request goes on from, a stored response or an item of one; "": nothing."""
    name = body.get("previous_response_id")
    if isinstance(name, str):
        return name
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") == "item_reference":
            return str(item.get("id"))
    return ""


def prefix_hashes(owner: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """A hash of each beginning of a prompt, the shortest first.

    Those of another owner or another `cache_salt` differ: their prompts share no cache.
    """
    state = blake2b(owner.encode(), digest_size=12)
    pieces = 0
    rest = b""
    for part in _parts(body):
        rest += json.dumps(part).encode()[: _PIECE_BYTES * (_MOST_PIECES - pieces)]
        while len(rest) >= _PIECE_BYTES and pieces < _MOST_PIECES:
            state.update(rest[:_PIECE_BYTES])
            rest, pieces = rest[_PIECE_BYTES:], pieces + 1
            yield state.copy().digest()
        if pieces == _MOST_PIECES:
            return


def _parts(body: Mapping[str, Any]) -> Iterator[Any]:
    for name in _HEADS:
        yield body.get(name)
    for name in _BODIES:
        value = body.get(name)
        yield from value if isinstance(value, list) else () if value is None else (value,)
