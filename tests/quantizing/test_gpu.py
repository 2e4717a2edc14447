"""Quantising on a GPU: tensors of layers and methods are there, within its budget."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretended_device import WHERE, PretendedDevice
from small_models import DENSE, MOE, checkpoint, contents, options

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import MIB
from hmt.contracts.plan import Tier
from hmt.quant.methods.awq import AWQ, Clipping
from hmt.quant.methods.interface import Method, Statistics, Target
from hmt.quant.methods.signround import SignRound
from hmt.quantizing import driver, quantize
from hmt.quantizing.measures import SampledInputs, divergence, energy, spread

_NARROW = {"layers": 2, "hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("dense"), replace(DENSE, **_NARROW))


def errors(report: dict) -> dict[str, float]:
    return {line["module"]: line["error"] for line in report["weights"]}


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "rotate,gptq", "keep": ("[kvo]_proj|up_proj|gate_proj",)},
        {"method": "smoothquant", "experts": 2, "target_bytes": 550_000, "widths": (4, 8)},
    ],
    ids=["dense", "moe"],
)
def test_everything_is_computed_where_the_gpu_is(
    asked: dict, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A tensor of host memory among those of the device would raise."""
    monkeypatch.setattr(driver, "open_device", lambda name: PretendedDevice())
    model, experts = dense, asked.pop("experts", 0)
    if experts:
        model = checkpoint(tmp_path / "model", replace(MOE, experts=experts, **_NARROW))
    asked |= {"sequences": 2, "length": 32}
    on_cpu = quantize(model, tmp_path / "cpu", options(**asked))
    on_gpu = quantize(model, tmp_path / "gpu", options(**asked, gpu="0"))
    assert errors(on_gpu.report) == pytest.approx(errors(on_cpu.report), rel=0.1)
    assert on_gpu.plan.device_total > on_gpu.plan.copies > 0
    assert on_cpu.plan.device_total == 0 < on_gpu.plan.total < on_cpu.plan.total


@pytest.mark.parametrize("target", [Target(), Target("nvfp4", 4, 16)], ids=["int4", "nvfp4"])
@pytest.mark.parametrize("method", [Clipping(), SignRound(steps=3)], ids=["awq", "signround"])
def test_methods_compute_there(method: Method, target: Target):
    weight, inputs = torch.randn(16, 32), torch.randn(50, 32)

    def rounded(where: torch.device) -> torch.Tensor:
        x, matrix = inputs.to(where), weight.to(where)
        statistics = Statistics(50, x.T @ x, x.abs().mean(0))
        factors = AWQ(steps=4).factors(statistics, [(matrix, target)])
        return method.quantize(matrix * factors, statistics, target).dequantized()

    with PretendedDevice().compute_stream():
        there = rounded(WHERE).cpu()
    torch.testing.assert_close(there, rounded(torch.device("cpu")))


def test_sensitivity_is_measured_there():
    weight, inputs = torch.randn(24, 32), torch.randn(50, 32)

    def measured(where: torch.device) -> list[float]:
        matrix, sampled = weight.to(where), SampledInputs(32, 2, where)
        for part in inputs.to(where).split(25):
            sampled.add(part)
        outputs = sampled.rows() @ matrix.T
        return [divergence(outputs, outputs.round()), spread(outputs), energy(matrix)]

    with PretendedDevice().compute_stream():
        there = measured(WHERE)
    assert there == pytest.approx(measured(torch.device("cpu")), rel=1e-4)


def test_memory_of_the_gpu_is_a_budget_of_its_own(dense: Path, tmp_path: Path):
    asked = {"method": "gptq", "sequences": 3, "gpu": "fake"}
    whole = quantize(dense, tmp_path / "whole", options(**asked))
    least = replace(whole.plan, statistics=0, activations=0).device_total
    with pytest.raises(BudgetError, match=r"--gpu-memory, or 0"):
        quantize(dense, tmp_path / "none", options(**asked, gpu_memory_bytes=least))
    some = options(**asked, gpu_memory_bytes=int(whole.plan.device_total * 0.95))
    fits = quantize(dense, tmp_path / "some", some)
    assert fits.plan.device_total <= int(some.gpu_memory_bytes * 0.9)
    assert fits.plan.batch < whole.plan.batch or fits.plan.statistics < whole.plan.statistics
    assert errors(fits.report) == pytest.approx(errors(whole.report), rel=0.05)


def test_accounts_of_the_gpu_are_charged_to_it(dense: Path, tmp_path: Path):
    seen = []

    class Ledger(driver.Ledger):
        def open(self, tier: Tier, purpose: str, limit_bytes: int, device: int = 0):
            seen.append((tier, purpose))
            return super().open(tier, purpose, limit_bytes, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "Ledger", Ledger)
        quantize(dense, tmp_path / "out", options(gpu="fake", gpu_memory_bytes=64 * MIB))
    on_gpu = {purpose for tier, purpose in seen if tier is Tier.DEVICE}
    assert on_gpu == {"work", "statistics", "activations", "copies"}
    assert {"slots", "staging"} <= {purpose for tier, purpose in seen if tier is Tier.HOST}


def test_what_a_gpu_began_another_device_does_not_end(dense: Path, tmp_path: Path):
    """Their last bits differ; memory may be another."""

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(dense, tmp_path / "out", options(gpu="fake"), progress=stop)
    with pytest.raises(ConfigError):
        quantize(dense, tmp_path / "out", options())
    quantize(dense, tmp_path / "out", options(gpu="fake", gpu_memory_bytes=64 * MIB))
    quantize(dense, tmp_path / "once", options(gpu="fake"))
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gptq", "awq", "signround", "rotate,awq,gptq"])
def test_a_gpu_errs_as_the_cpu_does_and_repeats_itself(method: str, tmp_path: Path):
    model = checkpoint(tmp_path / "model", DENSE)
    asked = {"method": method, "gpu": "0", "gpu_memory_bytes": 2 << 30}
    torch.cuda.reset_peak_memory_stats()
    once = quantize(model, tmp_path / "once", options(**asked))
    quantize(model, tmp_path / "again", options(**asked))
    assert contents(tmp_path / "once") == contents(tmp_path / "again")
    on_cpu = quantize(model, tmp_path / "cpu", options(method=method))
    assert errors(once.report) == pytest.approx(errors(on_cpu.report), rel=0.1)
    assert torch.cuda.max_memory_reserved() <= 2 << 30
