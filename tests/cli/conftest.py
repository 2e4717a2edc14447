"""The command line as a user meets it: arguments in; exit code, stdout and stderr out."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from hmt.cli import inference, main


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HMT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def hmt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: _call(main.main, "hmt", arguments, monkeypatch, capfd)


@pytest.fixture
def hmt_inference(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return lambda *arguments: _call(inference.main, "hmt-inference", arguments, monkeypatch, capfd)


def _call(
    entry: Callable[[], None],
    name: str,
    arguments: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Outcome:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        entry()
    out, err = capfd.readouterr()
    return Outcome(int(stopped.value.code or 0), out, err)
