"""`python -m hmt_bench kv-speed` without a GPU: on the CPU alone, on a fake device, and peers."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hmt.bench import ceilings
from hmt.bench.ceilings import ReadRate
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.profiling.random_model import Shape
from hmt_bench import kv_peers, kv_speed
from hmt_bench.__main__ import app
from hmt_bench.gpu import SHAPES

TASK = kv_speed.Task(contexts=(1024, 2048), steps=3)
WAYS = [kv_speed.Way(), kv_speed.Way("6MiB"), kv_speed.Way("6MiB", "int8")]


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, to measure its rate: a GiB takes seconds."""
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(kv_speed, "ReadRate", lambda least_bytes: ReadRate(1 << 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("gpu", [None, "fake"])
def test_a_run_adds_up(gpu: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    content = kv_speed.run(
        folder, "small", WAYS, TASK, gpu=gpu, gpu_memory="64MiB", host_memory="512MiB"
    )
    assert [r["name"] for r in content["results"]] == [
        "all near", "6MiB near, host exact", "6MiB near, host int8"
    ]  # fmt: skip
    assert content["ram_rate"] > 0
    read: dict[str, float] = {}
    for result in content["results"]:
        assert result["captured"] is (gpu is not None)
        for case in result["cases"]:
            assert case["tokens_per_s"] == pytest.approx(1 / case["step_s"])
            spent = case["attended_s"] + case["waited_s"] + case["rest_s"]
            assert spent == pytest.approx(case["step_s"])
            pages = case["device_pages"] + case["host_pages"]
            assert pages == -(-case["context"] // 16), "each page is somewhere"
            assert bool(case["host_bytes"]) is bool(case["attended_s"]) is bool(case["host_pages"])
        read[result["host"] + str(result["near"])] = case["host_bytes"] + case["fetched_bytes"]
        assert bool(case["fetched_bytes"]) is (gpu is not None and bool(case["host_pages"]))
        assert case["host_pages"] if result["near"] else not case["host_pages"]
    heads, dim, layers = SHAPES["small"].kv_heads, 32, SHAPES["small"].layers
    tiered = content["results"][1]["cases"][1]
    assert read["exact6MiB"] == pytest.approx(
        tiered["host_pages"] * 16 * 2 * heads * dim * 2 * layers, rel=0.1
    )
    assert read["int86MiB"] < 0.6 * read["exact6MiB"]


def test_what_does_not_fit_is_told(folder: Path) -> None:
    ways = [kv_speed.Way("64KiB")]
    content = kv_speed.run(folder, "small", ways, TASK, gpu=None, host_memory="512MiB")
    assert "--kv-gpu-memory" in content["results"][0]["failure"]


def test_peers_decode_after_as_many_positions(folder: Path) -> None:
    shape = Shape(2, 64, 96, 4, 2, vocab_size=128)
    [near, *quantized] = [make() for make in kv_peers.open_peers(shape, 128, "cpu")]
    times = near.decode(100, 2)
    assert len(times) == 2 and min(times) > 0
    assert [peer.name for peer in quantized] == ["transformers, quanto", "transformers, hqq"]
    content: dict[str, Any] = kv_speed.run(
        folder, "small", [], kv_speed.Task((512,), 2), gpu=None,
        peers=lambda shape, positions: kv_peers.open_peers(shape, positions, "cpu"),
    )  # fmt: skip
    assert content["peers"][0]["cases"][0]["tokens_per_s"] > 0
    for peer in content["peers"][1:]:  # what is not installed is told
        [case] = peer["cases"]
        assert "failure" in case or case["tokens_per_s"] > 0


def test_the_command_prints_and_writes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    asked = "--shape small --gpu-id none --near 6MiB,1KiB --contexts 1024 --steps 2 --no-peers"
    options = ["--host-memory", "512MiB", "--folder", str(folder), "--json", str(file)]
    done = CliRunner().invoke(app, ["kv-speed", *asked.split(), *options])
    assert done.exit_code != 0, "one amount of memory"
    asked = asked.replace(",1KiB", "")
    done = CliRunner().invoke(app, ["kv-speed", *asked.split(), *options])
    assert done.exit_code == 0, done.output
    assert "6MiB near, host int8" in done.output and "of RAM" in done.output
    assert json.loads(file.read_text())["benchmark"] == "kv-speed"
