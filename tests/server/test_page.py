"""The page at / without a browser: what is sent, and what the state tells."""

import asyncio
import re
from pathlib import PurePosixPath
from typing import Any

import pytest
from serving import CHAT, NAME, app_on, asking, held, http, run

from hmt.engine import LoadedModel
from hmt.server import KeyRing
from hmt.server.page.documents import DOCUMENTS

KEY = "sk-correct-horse"
STATE = "/v1/hmt/state"


async def get(app: Any, path: str, **headers: str) -> Any:
    async with http(app, **headers) as client:
        return await client.get(path)


def text(path: str) -> str:
    return DOCUMENTS[path].content.decode()


def test_the_page_is_whole_and_asks_nobody_else(model: LoadedModel) -> None:
    app = app_on(model)
    page = run(get(app, "/"))
    assert page.status_code == 200 and page.text == text("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in page.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'" and "'unsafe" not in str(policy)
    sources = {name: value for name, value in policy.items() if name.endswith("-src")}
    assert sources.pop("img-src") == "'self' data:"
    assert set(sources.values()) == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    # The policy allows none of these, so they would only not work.
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", page.text)
    named = re.findall(r'(?:src|href)="(?!#)([^"]+)"', page.text)
    for path in DOCUMENTS:
        if path.endswith(".js"):
            named += [f"page/{PurePosixPath(n)}" for n in re.findall(r'from "([^"]+)"', text(path))]
            assert not re.search(
                r"innerHTML|insertAdjacentHTML|\beval\b|document\.write", text(path)
            )
        # A namespace of drawings, and what begins a link in what a model wrote.
        elsewhere = re.findall(r"https?://[\w.]+", text(path))
        assert set(elsewhere) <= {"http://www.w3.org"}, path
    assert {f"/{name}" for name in named} | {"/"} == set(DOCUMENTS)
    ids = re.findall(r'\bid="([^"]+)"', page.text)
    assert len(ids) == len(set(ids))
    wanted = {i for path in DOCUMENTS for i in re.findall(r'byId\("([^"]+)"\)', text(path))}
    assert wanted <= set(ids)


def test_files_are_sent_once_and_need_no_key(model: LoadedModel) -> None:
    app = app_on(model, keys=KeyRing.of([KEY]))

    async def work() -> None:
        async with http(app) as client:
            for path in DOCUMENTS:
                found = await client.get(path)
                assert found.status_code == 200 and found.headers["x-content-type-options"]
                tag = {"if-none-match": found.headers["etag"]}
                again = await client.get(path, headers=tag)
                assert (again.status_code, again.content) == (304, b"")
            for path in (STATE, "/page/", "/page/../guard.py", "/page/documents.py", "/page"):
                assert (await client.get(path)).status_code == 401
            told = await client.get(STATE, headers={"authorization": f"Bearer {KEY}"})
            assert told.status_code == 200
            spec = await client.get("/openapi.json", headers={"x-api-key": KEY})
            paths = spec.json()["paths"]
            assert STATE in paths and not [path for path in paths if path.startswith("/page")]

    run(work())
    foreign = {"host": "evil.example"}  # a name that was led here
    assert run(get(app_on(model), "/", **foreign)).status_code == 403


def test_the_state_tells_what_was_done(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_on(model, max_waiting=5)

    async def work() -> None:
        async with http(app) as client:
            first = (await client.get(STATE)).json()
            done = (await client.post(CHAT, json=asking(max_tokens=64))).json()
            monkeypatch.setattr("hmt.server.page.snapshot_cache._APART_S", 0.0)
            state = (await client.get(STATE)).json()
            monkeypatch.setattr("hmt.server.page.snapshot_cache._APART_S", 3600.0)
            same = (await client.get(STATE)).json()
        spec = model.prepared.model.spec
        assert state["model"] == {
            "name": NAME, "architecture": spec.architecture, "layers": spec.layers,
            "published_bytes": model.prepared.published_bytes, "max_positions": 2048,
            "images_refused": "this LlamaForCausalLM reads text only",
        }  # fmt: skip
        assert state["requests"] == {
            "running": 0, "waiting": 0, "inside": 0, "max_running": 4, "max_waiting": 5,
        }  # fmt: skip
        before, engine = first["engine"], state["engine"]
        assert before["window_s"] == 0 and engine["window_s"] > 0 and engine["age_s"] >= 0
        assert same["engine"]["window_s"] == engine["window_s"]  # the same look
        tokens, usage = engine["tokens"], done["usage"]
        grown = tokens["generation"] - before["tokens"]["generation"]
        assert grown == usage["completion_tokens"] - 1  # the first one is the prompt's
        assert tokens["generation_per_s"] == pytest.approx(grown / engine["window_s"])
        prompt = tokens["prompt"] - before["tokens"]["prompt"]
        assert 0 < prompt <= usage["prompt_tokens"]
        assert 0 < sum(engine["time"].values()) <= 1.0 + 1e-6
        (host,) = engine["tiers"]  # it fits
        assert host["tier"] == "host" and host["budget_bytes"] == 96 << 20
        assert host["weights_bytes"] > 10 << 20 and host["experts_bytes"] == 0
        (link,) = engine["links"]
        moved = link["total_bytes"] - before["links"][0]["total_bytes"]
        assert (link["source"], link["target"]) == ("host", "cpu") and moved > 0
        assert link["rate"] == pytest.approx(moved / engine["window_s"])
        assert engine["kv"]["free_tokens"] == engine["kv"]["capacity_tokens"] == 2048
        assert engine["experts"] is None
        limit = engine["bottleneck"]
        assert limit["now"] and limit["link"] in ("memory", "computation") and limit["text"]

    run(work())


def test_who_watches_waits_for_no_long_step(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hmt.server.page.snapshot_cache._PATIENCE_S", 0.02)
    app = app_on(model)

    async def work() -> None:
        async with http(app) as client:
            with held(model):
                states = await asyncio.gather(*(client.get(STATE) for _ in range(3)))
                assert [one.json()["engine"] for one in states] == [None] * 3
                chats = [asyncio.create_task(client.post(CHAT, json=asking())) for _ in range(2)]
                while app.state.service.limit.inside < 2:
                    await asyncio.sleep(0.005)
                assert (await client.get(STATE)).json()["requests"]["inside"] == 2
            await asyncio.gather(*chats)
            monkeypatch.setattr("hmt.server.page.snapshot_cache._PATIENCE_S", 10.0)
            states = await asyncio.gather(*(client.get(STATE) for _ in range(3)))
            assert len({one.json()["engine"]["window_s"] for one in states}) == 1

    run(work())
