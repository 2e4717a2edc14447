"""A router over servers of one model: where requests go, and what comes back when a server ends.

The servers are threads with sockets of their own, and all of them share the small model.
"""

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from serving import CHAT, NAME, Call, asking, events_of, held, http, openai, run
from test_metrics import scrape

from hmt.engine import LoadedModel
from hmt.server import KeyRing, ServerConfig, create_app
from hmt.server.router import Replica, create_router
from hmt.server.router.placement import Placement, Reason, prefix_hashes
from hmt.server.run import _Server

LONG = "Repeat after me: " + "All work and no play makes Jack a dull boy. " * 12
KEYS = ("the-first-key", "the-second-key")


class Behind:
    """A server on a thread, which a test may end as a crash would."""

    def __init__(self, model: LoadedModel, number: int, path: Path, **options: Any) -> None:
        config = ServerConfig(replica=number, **options)
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(path))
        self._server = _Server(config, create_app(model, config))
        up = threading.Event()
        self._server.when_started = up.set
        self._thread = threading.Thread(target=self._server.run, args=([bound],))
        self._thread.start()
        assert up.wait(30)
        self.replica = Replica.at(number, path)

    def kill(self) -> None:
        """From one moment to the next nothing comes from it, and nobody can connect."""
        (listener,) = self._server.servers
        loop = listener._loop  # type: ignore[attr-defined]

        def end() -> None:
            listener.close()
            for connection in list(self._server.server_state.connections):
                connection.cut()  # type: ignore[union-attr]

        loop.call_soon_threadsafe(end)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


class Routed:
    """A router over servers behind it."""

    def __init__(self, behind: list[Behind], **options: Any) -> None:
        self.behind = behind
        self.replicas = [one.replica for one in behind]
        self.app: FastAPI = create_router(self.replicas, ServerConfig(**options), at_once=4)

    @property
    def taken(self) -> list[int]:
        return [one.taken for one in self.replicas]


@contextlib.contextmanager
def routed(model: LoadedModel, folder: Path, count: int = 2, **options: Any) -> Iterator[Routed]:
    behind = [Behind(model, n, folder / str(n), **options) for n in range(count)]
    try:
        yield Routed(behind, **options)
    finally:
        for one in behind:
            one.stop()


def test_a_router_answers_as_its_servers_do(
    model: LoadedModel, app: FastAPI, tmp_path: Path
) -> None:
    async def work(behind: Routed) -> None:
        async with http(app) as alone, http(behind.app) as client:
            for body in (asking(), asking(stream=True), asking(LONG, max_tokens=3)):
                wanted = (await alone.post(CHAT, json=body)).text
                assert said(await client.post(CHAT, json=body)) == said_in(wanted)
            for path in ("/openapi.json", "/"):
                found, wanted = await client.get(path), await alone.get(path)
                assert found.content == wanted.content
                assert found.headers["content-type"] == wanted.headers["content-type"]
            assert (await client.head("/v1/models")).status_code == 200
            wrong = await client.post(
                CHAT, json=asking(temperature=9), headers={"x-request-id": "a"}
            )
            assert wrong.status_code == 400 and wrong.headers["x-request-id"] == "a"
            assert wrong.json()["error"]["param"] == "temperature"
            load = await client.post("/v1/models/load", json={"model": NAME})
            assert load.status_code == 400 and "--dp" in load.json()["error"]["message"]
            large = await client.post(CHAT, content=b"[" * 70000, headers=JSON)
            assert large.status_code == 400

    with routed(model, tmp_path) as behind:
        run(work(behind))


JSON = {"content-type": "application/json"}


def said(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200
    return said_in(answer.text)


def said_in(text: str) -> Any:
    """What is the same each time."""
    if text.startswith("data"):
        return [event["choices"] for event in events_of(text)]
    answer = json.loads(text)
    return answer["choices"], answer["usage"]["completion_tokens"]


def test_prompts_go_where_their_beginning_is_known_and_stored_responses_are_found(
    model: LoadedModel, tmp_path: Path
) -> None:
    """Each key's by itself, and a stranger's nowhere."""
    texts = [f"{n}: {LONG}" for n in range(4)]

    async def work(behind: Routed) -> None:
        async with openai(behind.app, KEYS[0]) as mine, openai(behind.app, KEYS[1]) as others:
            for round in range(3):
                for text in texts:
                    more = text + "And again. " * round
                    await mine.chat.completions.create(**asking(more, max_tokens=1))
            assert behind.taken == [6, 6], "two prompts each"
            for client in (mine, others):
                for text in texts[:2]:
                    await client.chat.completions.create(**asking(text, max_tokens=1))
            assert behind.taken == [8, 8]
            metrics = await scrape(behind.app, KEYS[0])
            chosen = {
                reason: sum(
                    count for labels, count in metrics.items()
                    if labels[0] == "hmt_router_requests_total" and f"reason={reason}" in labels
                )
                for reason in Reason
            }  # fmt: skip
            assert chosen == {Reason.PREFIX: 10, Reason.LOAD: 6, Reason.STORED: 0}
            for number in "01":
                up = ("hmt_rank_up", f"model_name={NAME}")
                assert up not in metrics
                assert metrics[("hmt_replica_up", f"replica={number}")] == 1
                ended = ("hmt_answers_total", "end=length", f"model_name={NAME}")
                assert metrics[(*ended, f"replica={number}")] == 8
            ask: dict[str, Any] = {"model": NAME, "max_output_tokens": 2}
            made = [await mine.responses.create(**ask, input=f"Say {n}") for n in range(4)]
            assert {one.id[5:7] for one in made} == {"00", "01"}
            for one in made:
                assert (await mine.responses.retrieve(one.id)).output == one.output
                on = await mine.responses.create(**ask, input="Go on", previous_response_id=one.id)
                item: Any = {"type": "item_reference", "id": one.output[0].id}
                again = await mine.responses.create(**ask, input=[item])
                assert on.id[5:7] == again.id[5:7] == one.id[5:7]
                with pytest.raises(Exception, match="there is no response"):
                    await others.responses.retrieve(one.id)
            await mine.responses.delete(made[0].id)
        async with http(behind.app) as stranger:
            assert (await stranger.post(CHAT, json=asking())).status_code == 401
            assert (await stranger.get("/metrics")).status_code == 401
        assert sum(behind.taken) == 16 + 4 + 4 + 8 + 4 + 1

    with routed(model, tmp_path, keys=KeyRing.of(KEYS)) as behind:
        run(work(behind))


def test_a_server_that_ends_takes_no_other_request_with_it(
    model: LoadedModel, tmp_path: Path
) -> None:
    """An answer that has begun says that it is cut off; one that has not is begun again."""

    async def work(behind: Routed) -> None:
        begun = Call(behind.app, "/v1/messages", asking("Go", stream=True, max_tokens=40))
        waiting = [Call(behind.app, CHAT, asking(max_tokens=4)) for _ in range(2)]
        tasks = list[asyncio.Task[None]]()
        with held(model):
            for number, call in enumerate((begun, *waiting)):
                tasks.append(asyncio.create_task(call.run()))
                while sum(behind.taken) == number:
                    await asyncio.sleep(0.01)
            await begun.wrote.wait()
            assert behind.taken == [2, 1]
            behind.behind[0].kill()
            while behind.taken != [2, 2]:
                await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        for call in waiting:
            assert json.loads(call.text)["choices"][0]["message"]["content"] == "42"
        told = begun.text.rstrip().split("\n\n")[-1]
        assert told.startswith("event: error\ndata: ") and "replica 0" in told
        behind.replicas[0].failure = "it was killed"  # as its process's end would say
        async with http(behind.app) as client:
            assert (await client.get("/health")).json()["replicas"] == {"0": False, "1": True}
            assert (await client.get("/ready")).json()["replicas"] == {"1": "ready"}
            metrics = await scrape(behind.app)
            assert metrics[("hmt_router_cut_total",)] == 1
            assert metrics[("hmt_router_retries_total",)] == 1
            gone = {"model": NAME, "input": "Hi", "previous_response_id": "resp_00" + "0" * 30}
            answer = await client.post("/v1/responses", json=gone)
            assert answer.json()["error"]["code"] == "previous_response_not_found"
            behind.behind[1].kill()
            refused = await client.post(CHAT, json=asking())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_replica"
            behind.replicas[1].failure = "it was killed, too"
            assert (await client.get("/ready")).status_code == 503

    with routed(model, tmp_path) as behind:
        run(work(behind))


class Breaks(httpx2.AsyncByteStream):
    """The beginning of an answer."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"data: {"
        raise httpx2.ReadError("it has ended")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_stream_that_breaks_off_ends_in_its_own_dialect(path: str) -> None:
    kind = "application/x-ndjson" if path.startswith("/api") else "text/event-stream"

    def half(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": kind}, stream=Breaks())

    replica = Replica(0, httpx2.MockTransport(half))
    call = Call(create_router([replica], ServerConfig(), at_once=1), path, asking(stream=True))
    run(call.run())
    assert call.status == 200 and not call.messages[-1]["more_body"]
    last = call.text.strip().splitlines()[-1]
    event = json.loads(last.removeprefix("data: "))
    assert "has ended: ask again" in json.dumps(event)
    named = "event: error" in call.text
    assert named == path.startswith(("/v1/messages", "/v1/responses"))
    assert named == (event.get("type") == "error")


def test_a_client_that_goes_frees_the_server_behind(model: LoadedModel, tmp_path: Path) -> None:
    async def work(behind: Routed) -> None:
        call = Call(behind.app, CHAT, asking("Go", stream=True, max_tokens=1500, ignore_eos=True))
        task = asyncio.create_task(call.run())
        await call.wrote.wait()
        call.gone.set()
        await task
        while model.load.running:
            await asyncio.sleep(0.01)
        assert not any(one.running for one in behind.replicas)

    with routed(model, tmp_path, 1) as behind:
        run(work(behind))


def test_placement() -> None:
    """A prefix counts until its replica has too much to do; what failed is not chosen."""
    replicas = [Replica(number, httpx2.MockTransport(lambda _: httpx2.Response(200)))
                for number in range(3)]  # fmt: skip
    placement, rng = Placement(replicas, slack=4), random.Random(0)

    def chosen(text: str, owner: str = "", without: tuple[Replica, ...] = ()) -> tuple[int, Reason]:
        found = placement.choose(owner, asking(text), without)
        assert found is not None
        found[0].taken += 1
        return found[0].number, found[1]

    words = ["".join(rng.choices("abcdefgh ", k=700)) for _ in range(3)]
    first = [chosen(word) for word in words]
    assert sorted(first) == [(n, Reason.LOAD) for n in range(3)]
    for word, (number, _) in zip(words, first, strict=True):
        assert chosen(word + "more") == (number, Reason.PREFIX)
        assert chosen(word, owner="other")[1] is Reason.LOAD
        assert chosen(word[:100] + "x" + word[100:])[1] is Reason.LOAD
    number = first[0][0]
    replicas[number].running = 3
    assert chosen(words[0]) == (number, Reason.PREFIX)
    replicas[number].running = 4
    moved, reason = chosen(words[0])
    assert moved != number and reason is Reason.LOAD
    assert chosen(words[0]) == (moved, Reason.PREFIX), "it is known there now"
    assert chosen(words[0], without=(replicas[moved],))[0] != moved
    for one in replicas:
        one.failure = "ended"
    assert placement.choose("", asking("Hi")) is None


def test_hashes_are_of_beginnings() -> None:
    """Two bodies share as many as they share pieces of what they say, in the template's order."""
    rng = random.Random(1)
    for _ in range(50):
        turns = [{"role": "user", "content": "x" * rng.randrange(900)} for _ in range(4)]
        shared = rng.randrange(4)
        mine = list(prefix_hashes("me", {"messages": turns}))
        other = [*turns[:shared], {"role": "user", "content": "another"}, *turns]
        common = len(json.dumps(turns[:shared])) // 256
        theirs = list(prefix_hashes("me", {"messages": other}))
        assert sum(a == b for a, b in zip(mine, theirs, strict=False)) >= common - 1
        system = {"system": "y" * 300, "messages": turns}
        assert not set(mine) & set(prefix_hashes("me", system))
    assert len(list(prefix_hashes("", {"prompt": "z" * 10**6}))) == 256
