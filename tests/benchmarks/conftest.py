"""Benchmarks as a developer meets them."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from hmt.cli.main import guard
from hmt_bench.__main__ import app


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `python -m hmt_bench` with such arguments."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["hmt_bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            guard(app)
        out, err = capfd.readouterr()
        return Outcome(int(stopped.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Of all benchmarks, whose models are small."""
