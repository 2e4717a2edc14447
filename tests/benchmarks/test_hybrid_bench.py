"""`python -m hmt_bench hybrid` without a GPU: the task on a fake device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels import ops
from hmt_bench import hybrid
from hmt_bench.commands import hybrid as bench_hybrid
from hmt_bench.gpu_rates import Rates
from hmt_bench.skew import recorded_frequencies, router_biases

RATES = Rates(4e12, 50e9, 150e9, 40e9, 120e9, "w4a8:32")


SHAPE = replace(hybrid.SMALL, layers=4, dense_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the pack of SHAPE."""
    path = tmp_path_factory.mktemp("hybrid")
    hybrid.pack_of(path, SHAPE, "w4a8:32")
    return path


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))


def test_a_run_adds_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrid, "measure_rates", lambda device, encoding: RATES)
    task = hybrid.Task(batches=(1, 3), contexts=(64, 200), steps=3, prompt=300)
    traces = sorted((Path(__file__).parents[2] / "benchmarks" / "traces").glob("*.jsonl.gz"))
    report = bench_hybrid._Report()
    content = hybrid.run(
        folder, SHAPE, "4800KiB", task, host_memory="96MiB", gpu="fake", traces=traces[:2],
        found=report.tell,
    )  # fmt: skip
    report.end()
    assert 0 < content["expert_slots"] < 32 and content["link_share"] == 0.25
    cases = [(s["batch"], s["context"]) for s in content["steps"]]
    assert cases == 2 * [(1, 64), (1, 200), (3, 64)]
    assert [s["routing"] for s in content["steps"]] == 3 * ["uniform"] + 3 * ["recorded"]
    for step in content["steps"]:
        experts = step["found"] + step["brought"] + step["left"]
        assert 4 * 3 <= round(experts, 6) <= 4 * 3 * step["batch"], "of three layers, each once"
        missing = (step["brought"] + step["left"]) * step["expert_bytes"]
        assert step["allowed_s"] == pytest.approx(missing / 160e9)
        assert step["share"] == pytest.approx(step["allowed_s"] / step["step_s"])
    assert content["prompt"]["tokens_per_s"] > 0
    assert content["sparse_layers"] == 3
    most = content["gpu_most_bytes"]
    assert len(most) == 2 + 6 + 1 and content["gpu_used_bytes"] == max(most.values()) > 1 << 18
    told = capsys.readouterr().out.splitlines()
    assert "experts cached per layer" in told[0]
    assert len(told) == 1 + 6 + 1 + 1 and "GPU memory used at most" in told[-1]


def test_routers_choose_as_often_as_a_trace_says() -> None:
    shape = replace(hybrid.SMALL, layers=3, dense_layers=1)
    traces = sorted((Path(__file__).parents[2] / "benchmarks" / "traces").glob("*.jsonl.gz"))
    wanted = recorded_frequencies(traces, shape)
    assert wanted.shape == (2, 32)
    assert torch.allclose(wanted.sum(1), torch.full((2,), 4.0))
    biases = router_biases(wanted, shape, deviation=1.5)
    logits = 1.5 * torch.randn(4000, 32, generator=torch.Generator().manual_seed(5))
    for bias, often in zip(biases, wanted, strict=True):
        chosen, _ = ops.biased_sigmoid_topk(
            logits, bias, 4, groups=4, kept_groups=2, renormalise=True, scale=1.0
        )
        found = torch.bincount(chosen.flatten(), minlength=32) / 4000
        uniform = (often - 4 / 32).abs().sum()
        assert (found - often).abs().sum() < 0.3 * uniform, "much closer than routing that is even"
