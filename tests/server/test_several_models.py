"""Several models within one budget: loaded and unloaded while others answer."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, NAME, asking, http, run

import hmt
from hmt.cli.options import embedded_model
from hmt.server import LoadableModels, ServerConfig, create_app

LOAD, UNLOAD, STATE = "/v1/models/load", "/v1/models/unload", "/v1/hmt/state"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FastAPI]:
    """The small model under three names, in a budget with room for two."""
    folders = {name: tmp_path / name for name in ("second", "third")}
    for folder in folders.values():
        shutil.copytree(embedded_model(), folder)
    with hmt.Engine(host_memory="20MiB", context=512, max_batch=4) as engine:
        first = engine.load_model(embedded_model(), host_memory=9 << 20)
        yield create_app(first, ServerConfig(), LoadableModels(engine, folders))


async def told_of(client: Any) -> dict[str, tuple[float, float, float]]:
    """By model that is there: answers and tokens of clients, and tokens that steps computed."""
    text = (await client.get("/metrics")).text
    found = {
        (one.name, one.labels["model_name"], one.labels.get("phase")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if "model_name" in one.labels
    }
    return {
        name: (
            found["hmt_answer_seconds_count", name, None],
            found["hmt_tokens_total", name, None],
            found["hmt_computed_tokens_total", name, "generation"],
        )
        for metric, name, _ in found
        if metric == "hmt_kv_used_ratio"
    }


async def both_are_told_of(client: Any, before: Any, used: int) -> None:
    """Metrics and the page's state know both models, each by its name."""
    after = await told_of(client)
    assert before["second"] == (0, 0, 0)
    assert after["second"] == (1, used, used - 1) and after[NAME] == before[NAME]
    states = [
        (await client.get(STATE, params={"model": name} if name else None)).json()
        for name in (None, "second")
    ]
    assert [one["model"]["name"] for one in states] == [NAME, "second"]
    assert [one["models"] for one in states] == [[NAME, "second"]] * 2
    generated = [one["engine"]["tokens"]["generation"] for one in states]
    assert generated == [after[NAME][2], after["second"][2]]
    assert (await client.get(STATE, params={"model": "third"})).status_code == 404


def test_models_come_and_go(manager: FastAPI) -> None:
    async def work() -> None:
        async with http(manager) as client:

            async def post(path: str, status: int, **body: Any) -> Any:
                done = await client.post(path, json=body)
                assert done.status_code == status, done.text
                return done.json()

            async def loaded() -> dict[str, bool]:
                listed = (await client.get("/v1/models")).json()["data"]
                return {one["id"]: one["loaded"] for one in listed}

            own = await post(CHAT, 200, **asking())
            assert await loaded() == {NAME: True, "second": False, "third": False}
            told = await post(CHAT, 404, **asking(model="second"))
            assert told["error"]["code"] == "model_not_loaded"
            assert "/v1/models/load" in told["error"]["message"]

            # Answers go on while another model is read.
            both = asyncio.gather(
                post(LOAD, 200, model="second", host_memory="9MiB"), post(CHAT, 200, **asking(n=3))
            )
            assert (await both)[0]["loaded"]
            assert (await post(LOAD, 200, model="second"))["loaded"]  # it is
            before = await told_of(client)
            theirs = await post(CHAT, 200, **asking(model="second"))
            assert theirs["choices"] == own["choices"] and theirs["model"] == "second"

            await both_are_told_of(client, before, theirs["usage"]["completion_tokens"])

            told = await post(LOAD, 503, model="third")
            assert "Other models of this engine hold" in told["error"]["message"]
            engine = manager.state.model_manager.engine
            assert sum(engine._ledger.reserved_bytes(tier) for tier in ("host",)) <= 20 << 20

            # The one that everybody had goes: what it answers ends first, and nobody else gets in.
            answering = asyncio.create_task(
                post(CHAT, 200, **asking(ignore_eos=True, max_tokens=150))
            )
            while not manager.state.service.limit.inside:
                await asyncio.sleep(0.001)
            going = asyncio.create_task(post(UNLOAD, 200, model=NAME))
            await asyncio.sleep(0.01)
            assert going.done() or (await client.post(CHAT, json=asking())).status_code == 404
            assert not (await going)["loaded"]
            assert (await answering)["choices"][0]["finish_reason"] == "length"
            await post(UNLOAD, 200, model=NAME)  # it is
            assert await loaded() == {"second": True, NAME: False, "third": False}
            await post(LOAD, 200, model="third", host_memory="9MiB")
            assert list(await told_of(client)) == ["second", "third"]
            assert (await client.get(STATE)).json()["model"]["name"] == "second"
            assert (await client.get("/ready")).json() == {"status": "ready"}

            # Without patience an answer is cut off.
            long = asking(model="third", ignore_eos=True, max_tokens=400)
            cut = asyncio.create_task(client.post(CHAT, json=long))
            while not manager.state.model_manager.inside:
                await asyncio.sleep(0.001)
            await post(UNLOAD, 200, model="third", timeout=0)
            assert (await cut).status_code in (200, 503)
            await post(UNLOAD, 200, model="second")
            assert not any((await loaded()).values())
            assert engine._ledger.reserved_bytes("host") == 0
            assert (await client.get("/ready")).status_code == 503
            assert (await post(CHAT, 404, **asking()))["error"]["code"] == "model_not_loaded"
            await post(LOAD, 200, model=NAME)
            assert (await post(CHAT, 200, **asking()))["choices"] == own["choices"]

    run(work())


def test_what_cannot_be_loaded(manager: FastAPI, app: FastAPI) -> None:
    async def work() -> None:
        async with http(manager) as client, http(app) as fixed:
            for one, path, body, status, code in [
                (client, LOAD, {"model": "fourth"}, 404, "model_not_found"),
                (client, UNLOAD, {"model": "fourth"}, 404, "model_not_found"),
                (client, LOAD, {"model": "second", "host_memory": "much"}, 400, "invalid_value"),
                (client, LOAD, {"model": "second", "path": "/etc"}, 400, "unknown_parameter"),
                (client, LOAD, {"model": "second", "host_memory": "1MiB"}, 503, "unavailable"),
                (fixed, LOAD, {"model": NAME}, 403, "models_are_fixed"),
                (fixed, UNLOAD, {"model": NAME}, 403, "models_are_fixed"),
            ]:
                done = await one.post(path, json=body)
                assert (done.status_code, done.json()["error"]["code"]) == (status, code)

    run(work())
