"""One small model for all tests of the server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from serving import NAME, app_on, tooled_model
from vision_models import publish, vision_model

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel


@pytest.fixture(scope="session")
def model() -> Iterator[LoadedModel]:
    options = {"host_memory": "96MiB", "dtype": "float32", "context": 2048, "max_batch": 4}
    with hmt.Engine(**options) as engine:
        yield engine.load_model(embedded_model())


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A random model that sees images."""
    folder = tmp_path_factory.mktemp("models") / NAME
    publish(vision_model("qwen3_vl"), folder)
    with hmt.Engine(host_memory="96MiB", dtype="float32", context=512, max_batch=4) as engine:
        yield engine.load_model(folder)


@pytest.fixture
def app(model: LoadedModel) -> FastAPI:
    return app_on(model, max_waiting=12)


@pytest.fixture(scope="session", params=["<tool_call>", "[CALL]"], ids=["tagged", "whole"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FastAPI]:
    """A server of a model whose template knows tools, and whose weights do not."""
    folder = tooled_model(tmp_path_factory.mktemp("models") / "tools", request.param)
    with hmt.Engine(host_memory="64MiB", context=2048, max_batch=4) as engine:
        yield app_on(engine.load_model(folder))


@pytest.fixture(scope="module")  # not longer: it leaves the main thread an event loop
def browser() -> Iterator[Any]:
    from page_in_browser import launched

    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def address(model: LoadedModel) -> Iterator[str]:
    """Of a page of the small model."""
    from page_in_browser import served

    with served(model) as found:
        yield found


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    from page_in_browser import opening

    with opening(browser, address) as open_page:
        yield open_page
