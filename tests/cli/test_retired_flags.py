"""Flags and options by their old names."""

import logging

import pytest

from hmt.base.errors import ConfigError
from hmt.cli.retired_flags import _MOVED, RETIRED, by_new_names
from hmt.engine import EngineConfig
from hmt_bench.__main__ import app as hmt_bench_app


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


def test_a_benchmark_that_left_the_package_says_where_it_went(hmt) -> None:
    names = {command.name for command in hmt_bench_app.registered_commands}
    assert set(_MOVED) <= names
    for name in _MOVED:
        done = hmt("bench", name, "--folder", "x")
        assert done.code == 2 and done.err.count("\n") == 1
        assert f"python -m hmt_bench {name}" in done.err


def test_a_flag_that_is_gone_may_say_what_now_always_holds() -> None:
    assert by_new_names(["run", "--kv-select", "bound", "x"]) == ["run", "x"]
    assert by_new_names(["run", "--kv-select=bound"]) == ["run"]
    for given in (["--kv-select", "order"], ["--kv-select=order"], ["--kv-select"]):
        with pytest.raises(ConfigError, match="only bound proved useful"):
            by_new_names(["run", *given])
    assert by_new_names(["run", "--", "--kv-select"]) == ["run", "--", "--kv-select"]


def test_an_option_of_the_engine_that_is_gone_may_say_what_now_always_holds() -> None:
    assert EngineConfig.resolve(host_memory="1GiB", kv_select="bound").kv_policy == "exact"
    with pytest.raises(ConfigError, match="only bound proved useful"):
        EngineConfig.resolve(host_memory="1GiB", kv_select="order")
