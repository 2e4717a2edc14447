"""Flags and options by their old names."""

import logging

import pytest

from hmt.cli.retired_flags import RETIRED, by_new_names
from hmt.engine import EngineConfig


def test_old_flags_get_their_new_names() -> None:
    given = ["run", "--kv-disk", "/tmp", "--kv-order=lru", "--prompt", "x", "--", "--guesses"]
    wanted = [
        "run",
        "--kv-offload-dir",
        "/tmp",
        "--kv-eviction=lru",
        "--prompt",
        "x",
        "--",
        "--guesses",
    ]
    assert by_new_names(given) == wanted
    assert by_new_names(wanted) == wanted


def test_new_names_are_not_old_ones() -> None:
    assert not set(RETIRED) & set(RETIRED.values())


def test_old_options_of_the_engine_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = EngineConfig.resolve(host_memory="1GiB", guesses=False)
    assert config.expert_prefetch is False
