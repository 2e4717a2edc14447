"""What all tests share: measurements of the machine go to a folder of this run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("HMT_CACHE")
    os.environ["HMT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["HMT_CACHE"]
    else:
        os.environ["HMT_CACHE"] = before
