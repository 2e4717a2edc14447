"""`python -m hmt_bench images`: it measures HMT and transformers on the same image."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hmt.base.errors import ConfigError
from hmt_bench.__main__ import app

ASKED = ["images", "--shape", "qwen2.5-vl-small", "--layers", "2", "--side", "64", "--tokens", "4"]


def test_hmt_and_transformers_encode_the_same_image(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    more = ["--rounds", "1", "--models", str(tmp_path), "--json", str(results)]
    done = CliRunner().invoke(app, [*ASKED, "--memory", "256MiB,64MiB", *more])
    assert done.exit_code == 0, done.output
    content = json.loads(results.read_text())
    assert content["tokens_of_image"] == (64 // 28) ** 2
    assert [one["host_memory"] for one in content["results"]] == ["256MiB", "64MiB"]
    peer = content["transformers"]
    assert peer["difference_of_features"] < 0.02, "bf16 in another order"
    for one in (*content["results"], peer):
        rounds = one["rounds"]
        assert all(len(rounds[name]) == 1 for name in ("prepared_s", "encoded_s", "first_token_s"))
        assert 0 < rounds["encoded_s"][0] < rounds["first_token_s"][0]


def test_encoders_of_both_make_the_same_features(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    asked = ["--shapes", "qwen3-vl-small", "--layers", "2", "--side", "64", "--rounds", "2"]
    more = ["--models", str(tmp_path), "--json", str(results)]
    done = CliRunner().invoke(app, ["encoders", *asked, *more])
    assert done.exit_code == 0, done.output
    found = {one["dtype"]: one for one in json.loads(results.read_text())["results"]}
    assert found["float32"]["difference_of_features"] < 1e-5
    assert found["bfloat16"]["difference_of_features"] < 0.02
    for one in found.values():
        assert (one["patches"], one["tokens"]) == (16 * 16, 8 * 8)
        assert all(len(times) == 2 and min(times) > 0 for times in one["rounds"].values())


def test_an_unknown_encoder_is_refused() -> None:
    done = CliRunner().invoke(app, ["encoders", "--shapes", "x"])
    assert isinstance(done.exception, ConfigError) and "no shape x" in str(done.exception)


@pytest.mark.parametrize(
    ("given", "why"),
    [(["--shape", "x"], "no shape x"), (["--memory", "1GiB:1GiB"], "HOST with --device cpu")],
)
def test_what_cannot_be_measured_is_refused(given: list[str], why: str) -> None:
    done = CliRunner().invoke(app, [*ASKED, *given])
    assert isinstance(done.exception, ConfigError) and why in str(done.exception)
