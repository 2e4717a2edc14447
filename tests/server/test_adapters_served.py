"""Adapters over HTTP: as models of their own names, loaded and unloaded by vLLM's paths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter
from fastapi import FastAPI
from openai import NotFoundError
from serving import CHAT, NAME, app_on, asking, http, openai, run
from transformers import AutoModelForCausalLM

import hmt
from hmt.cli.options import embedded_model

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    reference = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype="float32")
    for seed, name in enumerate(("first", "second")):
        write_adapter(
            reference,
            folder / name,
            seed,
            targets=["q_proj", "down_proj"],
            rank=64,
            lora_alpha=1024,
        )
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[FastAPI]:
    options = {"host_memory": "96MiB", "dtype": "float32", "context": 512, "max_batch": 4}
    named = [f"first={folder}/first"]
    with hmt.Engine(adapters=named, adapter_memory="16MiB", **options) as engine:
        yield app_on(engine.load_model(embedded_model()), adapter_dir=folder)


def said(app: FastAPI, model: str, **options: Any) -> str:
    async def ask() -> str:
        async with openai(app) as client:
            body = asking("Tell me about the sea.", max_tokens=12) | {"model": model}
            answer = await client.chat.completions.create(**body, **options)
            assert answer.model == model
            text: str = answer.choices[0].message.content
            return text

    return str(run(ask()))


def post(app: FastAPI, path: str, **body: Any) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with http(app) as client:
            response = await client.post(path, json=body)
            is_json = response.headers["content-type"] == "application/json"
            return response.status_code, response.json() if is_json else response.text

    return run(ask())  # type: ignore[no-any-return]


def ids(app: FastAPI) -> list[str]:
    async def ask() -> list[str]:
        async with openai(app) as client:
            return [model.id async for model in client.models.list()]

    return run(ask())  # type: ignore[no-any-return]


def test_adapters_are_models_that_come_and_go(served: FastAPI) -> None:
    bare, first = said(served, NAME), said(served, f"{NAME}:first")
    assert bare != first
    assert ids(served) == [NAME, f"{NAME}:first"]
    with pytest.raises(NotFoundError, match="second"):
        said(served, f"{NAME}:second")
    status, told = post(served, LOAD, lora_name="second", lora_path="second")
    assert status == 200 and "added successfully" in told
    assert ids(served) == [NAME, f"{NAME}:first", f"{NAME}:second"]
    second = said(served, f"{NAME}:second")
    assert second not in (bare, first)
    assert said(served, f"{NAME}:first") == first and said(served, NAME) == bare
    status, told = post(served, LOAD, lora_name="second", lora_path="first")
    assert status == 400 and "already" in told["error"]["message"]
    assert post(served, UNLOAD, lora_name="second")[0] == 200
    status, told = post(served, UNLOAD, lora_name="second")
    assert status == 404 and told["error"]["code"] == "adapter_not_found"
    with pytest.raises(NotFoundError):
        said(served, f"{NAME}:second")


def test_one_in_use_is_not_unloaded(served: FastAPI) -> None:
    store = served.state.service.model.adapters.store
    hold = store.hold("first")
    status, told = post(served, UNLOAD, lora_name="first")
    assert status == 409 and told["error"]["code"] == "adapter_in_use"
    del hold
    assert post(served, UNLOAD, lora_name="first")[0] == 200
    assert post(served, LOAD, lora_name="first", lora_path="first")[0] == 200


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("x", "../elsewhere", "invalid_value"),
        ("x", "/etc", "invalid_value"),
        ("x", "first\0", "invalid_value"),
        ("x", "none", "invalid_adapter"),
        ("x", "", "invalid_adapter"),
        ("a:b", "first", "invalid_adapter"),
        ("", "first", "invalid_adapter"),
    ],
)
def test_paths_and_names_that_are_refused(name: str, path: str, code: str, served: FastAPI) -> None:
    status, told = post(served, LOAD, lora_name=name, lora_path=path)
    assert status == 400 and told["error"]["code"] == code
    assert post(served, LOAD, lora_name="x")[0] == 400


def test_a_server_without_a_folder_keeps_its_adapters(served: FastAPI) -> None:
    fixed = app_on(served.state.service.model)
    for path, body in ((LOAD, {"lora_path": "first"}), (UNLOAD, {})):
        status, told = post(fixed, path, lora_name="first", **body)
        assert status == 403 and "--adapter-dir" in told["error"]["message"]
    assert ids(fixed) == [NAME, f"{NAME}:first"]


def test_what_adapters_there_are_is_told(served: FastAPI) -> None:
    async def ask() -> Any:
        async with http(served) as client:
            one = await client.get(f"/v1/models/{NAME}:first")
            return one.json(), (await client.get("/v1/adapters")).json()

    one, every = run(ask())
    assert (one["id"], one["parent"]) == (f"{NAME}:first", NAME)
    assert every["data"][0]["id"] == "first" and every["data"][0]["rank"] == 64
    assert post(served, CHAT, **asking(max_tokens=2), lora="first")[0] == 400
