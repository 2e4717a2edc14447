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
    given     the items of its input, as a JSON list
    previous  the response that it goes on from
    """

    owner: str
    response: bytes
    given: bytes
    previous: str | None

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return len(self.response) + len(self.given) + _OVERHEAD

    @property
    def output(self) -> list[dict[str, Any]]:
        """Its items."""
        found: list[dict[str, Any]] = json.loads(self.response)["output"]
        return found


@dataclass(slots=True)
class ResponseStore:
    """The responses of a server.  Those not used for longest go first.  For the event loop."""

    most_responses: int = MOST_RESPONSES
    most_bytes: int = MOST_BYTES
    held_bytes: int = 0
    _entries: "OrderedDict[str, StoredResponse]" = field(default_factory=OrderedDict)
    _items: dict[str, str] = field(default_factory=dict)  # which response has which item

    def __len__(self) -> int:
        """Responses that are held."""
        return len(self._entries)

    def put(self, name: str, entry: StoredResponse) -> None:
        """Keep a response.  One that is larger than all may be together is not kept."""
        self._entries[name] = entry
        self.held_bytes += entry.size
        self._items.update((item["id"], name) for item in entry.output)
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
        found: list[StoredResponse] = []
        wanted: str | None = name
        while wanted is not None:
            entry = self._entries.get(wanted)
            if entry is None or entry.owner != owner:
                raise ApiError(
                    400,
                    self._gone(wanted) + ": send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self._entries.move_to_end(wanted)
            found.append(entry)
            wanted = entry.previous
        return found[::-1]

    def item(self, owner: str, name: str) -> dict[str, Any]:
        """An item of a response's output.  Raises ApiError 404."""
        entry = self._entries.get(self._items.get(name, ""))
        for item in entry.output if entry is not None and entry.owner == owner else ():
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
        for item in entry.output:
            self._items.pop(item["id"], None)
