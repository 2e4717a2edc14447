"""Responses that the server keeps: asked for later, gone on from, listed, deleted, in bounds."""

import dataclasses
import json
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, NotFoundError
from serving import NAME as SMALL
from serving import app_on, http, openai, run
from test_responses import PATH, forced, post

from hmt.engine import LoadedModel
from hmt.server.errors import ApiError
from hmt.server.keys import KeyRing
from hmt.server.responses.store import ResponseStore, StoredResponse

JSON = {"content-type": "application/json"}


def test_stored_responses(model: LoadedModel) -> None:
    """Each key has its own."""
    keys = KeyRing.of(["the-first-key", "the-second-key"])
    app = app_on(model, keys=keys)

    async def work() -> None:
        async with openai(app, "the-first-key") as mine, openai(app, "the-second-key") as others:
            ask = {"model": SMALL, "input": "Hi", "max_output_tokens": 3}
            done = await mine.responses.create(**ask, metadata={"topic": "demo"})
            again = await mine.responses.retrieve(done.id)
            assert again == done and again.metadata == {"topic": "demo"} and again.store
            for client, name in ((others, done.id), (mine, "resp_none")):
                with pytest.raises(NotFoundError, match="there is no response"):
                    await client.responses.retrieve(name)
                with pytest.raises(BadRequestError) as error:
                    await client.responses.create(**ask, previous_response_id=name)
                assert error.value.code == "previous_response_not_found"
                with pytest.raises(NotFoundError):
                    await client.responses.delete(name)
            item = {"type": "item_reference", "id": done.output[0].id}
            with pytest.raises(NotFoundError, match="there is no item"):
                await others.responses.create(**ask | {"input": [item]})
            with pytest.raises(BadRequestError, match="comes whole"):
                await mine.responses.retrieve(done.id, stream=True)
            await mine.responses.delete(done.id)
            with pytest.raises(NotFoundError):
                await mine.responses.retrieve(done.id)
            unstored = await mine.responses.create(**ask, store=False)
            assert unstored.store is False  # type: ignore[attr-defined]
            with pytest.raises(NotFoundError):
                await mine.responses.retrieve(unstored.id)
        assert len(app.state.responses) == 0

    run(work())


def test_pages_of_items_end_although_two_have_one_id(model: LoadedModel) -> None:
    app = app_on(model)
    twice = [{"role": "user", "content": text, "id": "same"} for text in ("One", "Two")]

    async def work() -> None:
        async with openai(app) as client:
            ask = {"model": SMALL, "input": twice, "max_output_tokens": 1}
            done = await client.responses.create(**ask)  # type: ignore[call-overload]
            items = client.responses.input_items
            assert [one.id async for one in items.list(done.id, limit=1)] == ["same"]
            assert [one.id async for one in items.list(done.id)] == ["same"] * 2

    run(work())


def test_nested_items_come_back_or_are_refused(model: LoadedModel) -> None:
    """What is read, kept and read again as deep as a client nests it, up to where Python ends."""
    app = app_on(model)

    async def work() -> None:
        async with http(app) as client:
            told = set()
            for depth in (300, *range(880, 1000, 8)):
                deep = '{"a":' * depth + "1" + "}" * depth
                body: dict[str, Any] = {
                    "model": SMALL, "max_output_tokens": 1, "reasoning": {"a": "DEEP"},
                    "input": [{"role": "user", "content": "Hi"},
                              {"type": "web_search_call", "a": "DEEP"}],
                }  # fmt: skip
                content = json.dumps(body).replace('"DEEP"', deep)
                first = await client.post(PATH, content=content, headers=JSON)
                told.add(first.status_code)
                if first.status_code == 200:
                    name = first.json()["id"]
                    on = {"model": SMALL, "input": "On", "previous_response_id": name}
                    later = await client.post(PATH, json=on | {"max_output_tokens": 1})
                    listed = await client.get(f"{PATH}/{name}/input_items")
                    told |= {later.status_code, listed.status_code}
                    assert depth > 300 or later.status_code == listed.status_code == 200
            assert told == {200, 400}

    run(work())


def test_what_is_stored_counts_as_sent(model: LoadedModel) -> None:
    """A conversation that goes on cannot be longer than one that is sent whole."""
    app = app_on(model, max_body_bytes=20_000)

    async def work() -> None:
        async with http(app) as client:
            part = {"role": "user", "content": "word " * 100}
            body: dict[str, Any] = {"model": SMALL, "input": [part], "max_output_tokens": 1,
                                    "metadata": {"a": "b" * 9000}}  # fmt: skip
            done = (await client.post(PATH, json=body)).json()
            store = app.state.responses
            entry = store.get("", done["id"])
            longer = dataclasses.replace(entry, given=b" " * 12_000 + entry.given)
            store.put("resp_long", longer)
            refused = await client.post(PATH, json=body | {"previous_response_id": "resp_long"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")

    run(work())


def entry(owner: str, text: str, previous: str | None = None) -> StoredResponse:
    ids = f"in_{text[:9]}", f"msg_{text[:9]}"
    given = json.dumps([{"id": ids[0], "text": text}]).encode()
    whole = json.dumps({"output": [{"id": ids[1]}]}).encode()
    return StoredResponse(owner, whole, given, previous, ids)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9000), st.booleans()), max_size=40))
def test_the_store_is_bounded(steps: list[tuple[int, int, bool]]) -> None:
    """The last ones stay, those that were asked for among them."""
    store = ResponseStore(most_responses=4, most_bytes=9000)
    order: list[tuple[str, StoredResponse]] = []
    for number, (wanted, length, asks) in enumerate(steps):
        if asks and order:
            name, kept = order.pop(wanted % len(order))
            assert store.get("me", name) is kept
            order.append((name, kept))
            continue
        kept = entry("me", f"{number:09}" + "x" * length)
        store.put(str(number), kept)
        if kept.size > 9000:
            continue  # and nothing gives way to it
        order.append((str(number), kept))
        while len(order) > 4 or sum(one.size for _, one in order) > 9000:
            order.pop(0)
        assert len(store) == len(order)
        assert store.held_bytes == sum(one.size for _, one in order)
        for name, one in order:
            for item in (*one.asked, *one.output):
                assert store.item("me", item["id"]) == item, name
    assert len(store._items) == 2 * len(order)


def test_a_conversation_stays_together() -> None:
    store = ResponseStore(most_responses=3)
    store.put("a", entry("me", "a"))
    store.put("b", entry("me", "b", "a"))
    store.put("c", entry("me", "c"))
    assert [one.asked[0]["text"] for one in store.before("me", "b")] == ["a", "b"]
    store.put("d", entry("me", "d"))  # c was not used since
    assert len(store.before("me", "b")) == 2
    with pytest.raises(ApiError, match="no response 'c'"):
        store.get("me", "c")
    store.delete("me", "a")
    with pytest.raises(ApiError, match="send the whole conversation"):
        store.before("me", "b")
    assert [one.asked[0]["text"] for one in store.held("me", "b")] == ["b"]


def test_an_item_is_the_keys_own() -> None:
    """Clients choose ids of what they send: another's item of that name is another item."""
    store = ResponseStore()
    store.put("a", entry("me", "x"))
    store.put("b", entry("you", "x", "a"))
    store.put("c", entry("me", "x"))
    assert store.item("me", "in_x") and store.item("you", "in_x")
    assert len(store.held("you", "b")) == 1  # what goes before is not theirs
    store.delete("you", "b")
    assert store.item("me", "in_x")
    with pytest.raises(ApiError, match="there is no item"):
        store.item("you", "in_x")


def test_what_a_response_answered(tooled: FastAPI) -> None:
    """By pages, oldest or newest first, with all that it goes on from; as OpenAI's client asks."""
    said = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "When?",
            "id": "mine"}]  # fmt: skip
    first = post(tooled, forced("Now.", input="Hello"))
    last = post(tooled, forced("So.", input=said, previous_response_id=first["id"]))

    async def work() -> None:
        async with openai(tooled) as client:
            items = client.responses.input_items
            found = [one async for one in items.list(last["id"], order="asc", limit=2)]
            texts = ["Hello", "Now.", "Yes?", "When?"]
            assert [one.content[0].text for one in found] == texts  # type: ignore[union-attr]
            assert [one.content[0].type for one in found] == [  # type: ignore[union-attr]
                "input_text", "output_text", "output_text", "input_text"]  # fmt: skip
            assert len({one.id for one in found}) == 4 and found[3].id == "mine"
            newest = await items.list(last["id"])
            assert [one.id for one in newest.data] == [one.id for one in found[::-1]]
            assert not newest.has_more
            (one,) = (await items.list(last["id"], after="mine", limit=1)).data
            assert one.id == found[2].id
            for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
                with pytest.raises(BadRequestError) as error:
                    await items.list(last["id"], **wrong)  # type: ignore[arg-type]
                assert error.value.param == next(iter(wrong))
            with pytest.raises(NotFoundError, match="there is no response"):
                await items.list("resp_none")
        again = [{"type": "item_reference", "id": found[0].id}]
        async with http(tooled) as client:
            done = (await client.post(PATH, json=forced("Yes.", input=again))).json()
            (item,) = (await client.get(f"{PATH}/{done['id']}/input_items")).json()["data"]
        assert item["id"] == found[0].id

    run(work())
