"""One small model for all tests of the server."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from serving import app_on

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel


@pytest.fixture(scope="session")
def model() -> Iterator[LoadedModel]:
    options = {"host_memory": "96MiB", "dtype": "float32", "context": 2048, "max_batch": 4}
    with hmt.Engine(**options) as engine:
        yield engine.load_model(embedded_model())


@pytest.fixture
def app(model: LoadedModel) -> FastAPI:
    return app_on(model, max_waiting=12)
