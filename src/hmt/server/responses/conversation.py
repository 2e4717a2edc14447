"""What a response answers: its input, behind all that the responses before it hold."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter

from hmt.server.client import CLIENT
from hmt.server.errors import ApiError
from hmt.server.json_shape import check_shape
from hmt.server.responses.items import AnyItem, ItemReference, MessageItem
from hmt.server.responses.output import new_id
from hmt.server.responses.schemas import ResponsesBody
from hmt.server.responses.store import ResponseStore, StoredResponse

_ITEMS: Final[TypeAdapter[list[AnyItem]]] = TypeAdapter(list[AnyItem])
# What ids begin with, by types of items.
_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "reasoning": "rs",
}  # fmt: skip


@dataclass(slots=True)
class Conversation:
    """The items of one request, and what becomes of its response.

    given   the request as it came
    owner   whose key it came with
    """

    store: ResponseStore
    owner: str
    body: ResponsesBody
    given: dict[str, Any]
    _referred: dict[str, dict[str, Any]] = field(default_factory=dict)  # items by id

    async def items(self) -> list[AnyItem]:
        """All that the model is told.

        What the server held counts as part of the body, as if it had been sent.  Raises ApiError.
        """
        before: list[AnyItem] = []
        previous = self.body.previous_response_id
        if previous is not None:
            held = list(_items_of(self.store.before(self.owner, previous)))
            CLIENT.get().hold(sum(map(len, held)))
            check_shape(bytearray().join(held))
            # By the parser that read them as a body: pydantic's own ends at less depth.
            before = [item for part in held for item in _ITEMS.validate_python(json.loads(part))]
        asked = self.body.input
        if isinstance(asked, str):
            return [*before, MessageItem(role="user", content=asked)]
        return [*before, *(self._resolved(item) for item in asked or ())]

    async def keep(self, response: dict[str, Any]) -> None:
        """Store the response where the request wants that."""
        if not self.body.stored:
            return
        asked = self.given.get("input") or []
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]

        def entry() -> StoredResponse:
            items = [_told(self._referred.get(str(item.get("id")), item)) for item in asked]
            ids = tuple(item["id"] for item in (*items, *response["output"]))
            given, whole = json.dumps(items).encode(), json.dumps(response).encode()
            return StoredResponse(self.owner, whole, given, self.body.previous_response_id, ids)

        self.store.put(response["id"], await asyncio.to_thread(entry))

    def _resolved(self, item: AnyItem) -> AnyItem:
        if not isinstance(item, ItemReference):
            return item
        found = self._referred[item.id] = self.store.item(self.owner, item.id)
        CLIENT.get().hold(len(json.dumps(found)))
        (whole,) = _ITEMS.validate_python([found])
        return whole


def page_of(
    chain: Sequence[StoredResponse], after: str | None, limit: int, order: str
) -> dict[str, Any]:
    """A list, in OpenAI's form, of what the last response of `chain` answered.

    Raises ApiError where no item of it is called `after`.
    """
    items: list[dict[str, Any]] = []
    for entry in chain:
        items += entry.asked
        if entry is not chain[-1]:
            items += entry.output
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            why = f"there is no item {after[:80]!r} among those that the response answered"
            raise ApiError(400, why, param="after", code="item_not_found")
        items = items[places[-1] + 1 :]  # where several have one id: else pages never end
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


def _told(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a request as it is listed: with an id, messages with parts of content."""
    kind = item.get("type") or "message"
    told = {"id": None, **item, "type": kind}
    if not isinstance(told["id"], str):
        told["id"] = new_id(_PREFIXES.get(kind, "item"))
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        told["content"] = [{"type": part, "text": item["content"]}]
    return told


def _items_of(entries: Iterable[StoredResponse]) -> Iterable[bytes]:
    """The items of responses and of what was asked, each list as JSON."""
    for entry in entries:
        yield entry.given
        yield json.dumps(entry.output).encode()
