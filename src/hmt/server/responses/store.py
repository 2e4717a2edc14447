"""Responses that clients may ask for later, or go on from: the last ones, in bounded memory."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from hmt.base.units import MIB
from hmt.server.errors import ApiError

MOST_RESPONSES: Final = 1024
MOST_BYTES: Final = 32 * MIB
_OVERHEAD: Final = 1024  # bytes of an entry beside its JSON, about


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    owner     whose key it belongs to; "" without keys
    response  as JSON
    given     the items of its input, as a JSON list; each has an id
    previous  the response that it goes on from
    ids       of the items of its input and its output
    """

    owner: str
    response: bytes
    given: bytes
    previous: str | None
    ids: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return len(self.response) + len(self.given) + sum(map(len, self.ids)) + _OVERHEAD

    @property
    def output(self) -> list[dict[str, Any]]:
        """Its items."""
        found: list[dict[str, Any]] = json.loads(self.response)["output"]
        return found

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The items of its input."""
        found: list[dict[str, Any]] = json.loads(self.given)
        return found


@dataclass(slots=True)
class ResponseStore:
    """The responses of a server.  Those not used for longest go first.  For the event loop."""

    most_responses: int = MOST_RESPONSES
    most_bytes: int = MOST_BYTES
    held_bytes: int = 0
    _entries: "OrderedDict[str, StoredResponse]" = field(default_factory=OrderedDict)
    _items: dict[tuple[str, str], str] = field(default_factory=dict)  # (owner, item): its response

    def __len__(self) -> int:
        """Responses that are held."""
        return len(self._entries)

    def put(self, name: str, entry: StoredResponse) -> None:
        """Keep a response.  One that is larger than all may be together is not kept."""
        if entry.size > self.most_bytes:
            return
        self._entries[name] = entry
        self.held_bytes += entry.size
        for item in entry.ids:
            self._items.setdefault((entry.owner, item), name)
        while len(self._entries) > self.most_responses or self.held_bytes > self.most_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, owner: str, name: str) -> StoredResponse:
        """A response.  Raises ApiError 404."""
        entry = self._entries.get(name)
        if entry is None or entry.owner != owner:
            raise ApiError(404, self._gone(name), param="response_id", code="response_not_found")
        self._entries.move_to_end(name)
        return entry

    def delete(self, owner: str, name: str) -> None:
        """Forget a response.  Raises ApiError 404."""
        self.get(owner, name)
        self._drop(name)

    def before(self, owner: str, name: str) -> list[StoredResponse]:
        """A response and all that it goes on from, the first one first.  Raises ApiError 400."""
        found = self._chain(owner, name)
        gone = found[-1].previous if found else name
        if gone is not None:
            raise ApiError(
                400,
                self._gone(gone) + ": send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[::-1]

    def held(self, owner: str, name: str) -> list[StoredResponse]:
        """A response and those that it goes on from, as far as they are held, the first one first.

        Raises ApiError 404.
        """
        self.get(owner, name)
        return self._chain(owner, name)[::-1]

    def _chain(self, owner: str, name: str) -> list[StoredResponse]:
        """A response and those that it goes on from, until one that is not there."""
        found: list[StoredResponse] = []
        wanted: str | None = name
        while wanted is not None:
            entry = self._entries.get(wanted)
            if entry is None or entry.owner != owner:
                break
            self._entries.move_to_end(wanted)
            found.append(entry)
            wanted = entry.previous
        return found

    def item(self, owner: str, name: str) -> dict[str, Any]:
        """An item of a response, or of its input.  Raises ApiError 404."""
        entry = self._entries.get(self._items.get((owner, name), ""))
        for item in () if entry is None else (*entry.asked, *entry.output):
            if item["id"] == name:
                return item
        raise ApiError(
            404,
            f"there is no item {name[:80]!r}: items are kept with their response; send it whole, "
            "or with store: true",
            param="input",
            code="item_not_found",
        )

    def _gone(self, name: str) -> str:
        return (
            f"there is no response {name[:80]!r}; this server keeps the last {self.most_responses} "
            f"in {self.most_bytes // MIB} MiB, of requests without store: false"
        )

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self.held_bytes -= entry.size
        for item in entry.ids:
            if self._items.get((entry.owner, item)) == name:
                del self._items[entry.owner, item]
