"""`hmt bench hybrid` without a GPU: the task on a pretended device."""

from dataclasses import replace
from pathlib import Path

import pytest

from hmt.base.errors import ConfigError
from hmt.bench import hybrid
from hmt.bench.gpu_rates import Rates
from hmt.cli import bench_hybrid
from hmt.engine import machine
from hmt.engine.link_rates import LinkRates

RATES = Rates(4e12, 50e9, 150e9, 40e9, 120e9, "w4a8:32")


def test_a_run_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrid, "measure_rates", lambda device, encoding: RATES)
    monkeypatch.setitem(machine._links, "a pretended device", LinkRates(40e9, 30e9, 90e9))
    shape = replace(hybrid.SMALL, layers=4, dense_layers=1)
    task = hybrid.Task(batches=(1, 3), contexts=(64, 200), steps=3, prompt=300)
    content = hybrid.run(tmp_path, shape, "5MiB", task, host_memory="96MiB", gpu="pretended")
    assert 0 < content["expert_slots"] < 32 and content["link_share"] == 0.25
    assert [(s["batch"], s["context"]) for s in content["steps"]] == [(1, 64), (3, 64), (1, 200)]
    for step in content["steps"]:
        experts = step["found"] + step["brought"] + step["left"]
        assert 4 * 3 <= experts <= 4 * 3 * step["batch"], "of three layers, each once"
        missing = (step["brought"] + step["left"]) * step["expert_bytes"]
        assert step["allowed_s"] == pytest.approx(missing / 160e9)
        assert step["share"] == pytest.approx(step["allowed_s"] / step["step_s"])
    assert content["prompt"]["tokens_per_s"] > 0
    bench_hybrid._print(content)
    assert "experts cached per layer" in capsys.readouterr().out


def test_lists_are_checked() -> None:
    assert bench_hybrid._numbers("--batches", "1,16") == (1, 16)
    for text in ("", "a", "0,1"):
        with pytest.raises(ConfigError, match="--batches"):
            bench_hybrid._numbers("--batches", text)
