"""AWQ and SmoothQuant: factors of inputs that keep outputs, and what is searched for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_methods import TARGETS, correlated, random

from hmt.base.errors import ConfigError
from hmt.quant.methods.awq import AWQ, Clipping
from hmt.quant.methods.gptq import output_errors
from hmt.quant.methods.interface import Statistics, Target
from hmt.quant.methods.rounding import Rounding
from hmt.quant.methods.smoothquant import SmoothQuant

RECORDED = load_file(Path(__file__).parent / "awq.safetensors")  # by record_awq.py


def seen(seed: int = 0, columns: int = 64) -> Statistics:
    """Inputs of very different size, with all that methods may want to know of them."""
    inputs = correlated(columns, seed)
    rows = inputs.samples
    return Statistics(len(rows), inputs.hessian, rows.abs().mean(0), rows, rows.abs().amax(0))


@pytest.mark.parametrize("method", [AWQ(), SmoothQuant(), SmoothQuant(0.8)], ids=str)
def test_outputs_stay_as_they_are_while_nothing_is_rounded(method):
    inputs, weight = seen(), random(12, 64, seed=4)
    factors = method.factors(inputs, [(weight, Target())])
    assert (factors > 0).all() and factors.max() > 2 * factors.min()
    rows = inputs.samples.double()
    expected = rows @ weight.double().T
    found = (rows / factors) @ (weight * factors).double().T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["int4", "int3", "zeros4"])
def test_the_search_is_llm_compressors(case):
    bits = int(case[-1])
    target = Target(bits=bits, symmetric=not case.startswith("zeros"))
    samples, weights = RECORDED["inputs"], [RECORDED["first"], RECORDED["second"]]
    inputs = Statistics(len(samples), samples.T @ samples, samples.abs().mean(0))
    behind = [(weight, target) for weight in weights]
    errors = AWQ().errors(inputs, behind, AWQ().candidates(inputs.mean_abs))
    mean = errors / len(samples) / sum(map(len, weights))
    torch.testing.assert_close(mean, RECORDED[f"{case}/errors"].double(), rtol=2e-3, atol=0)
    assert 0 < int(mean.argmin()) < len(mean) - 1
    factors = AWQ().factors(inputs, behind)
    torch.testing.assert_close(factors, RECORDED[f"{case}/factors"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", [3, 4])
def test_awq_errs_less_than_without_factors(bits):
    inputs, weight, target = seen(3, 128), random(32, 128, seed=5), Target(bits=bits)
    factors = AWQ().factors(inputs, [(weight, target)])
    plain = Rounding().quantize(weight, Statistics(0), target).dequantized() - weight
    scaled = Rounding().quantize(weight * factors, Statistics(0), target).dequantized()
    lost = scaled / factors - weight
    rows = inputs.samples
    assert (rows @ lost.T).square().sum() < 0.9 * (rows @ plain.T).square().sum()


@pytest.mark.parametrize("target", [t for t in TARGETS if t.group_size], ids=str)
def test_clipping_errs_no_more_than_weighted_rounding_in_any_group(target):
    inputs, weight = seen(1, 128), random(16, 128, seed=6)
    before = Rounding(weighted=True).quantize(weight, inputs, target)
    after = Clipping().quantize(weight, inputs, target)
    blocks = torch.block_diag(
        *[
            inputs.hessian[at : at + target.group_size, at : at + target.group_size]
            for at in range(0, 128, target.group_size)
        ]
    ).double()
    rounded, clipped = (output_errors(weight, made, blocks) for made in (before, after))
    assert (clipped <= rounded * 1.0001).all()
    if target.kind == "int" and target.symmetric and target.bits < 8:
        assert clipped.sum() < 0.95 * rounded.sum()
        assert torch.equal(after.scales, after.scales.bfloat16().float())


def test_chunks_of_rows_clip_alike(monkeypatch):
    inputs, weight, target = seen(1, 128), random(16, 128, seed=6), Target()
    whole = Clipping().quantize(weight, inputs, target)
    monkeypatch.setattr("hmt.quant.methods.awq._NUMBERS", 384)
    assert torch.equal(Clipping().quantize(weight, inputs, target).codes, whole.codes)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothquant_is_the_papers_equation(alpha):
    inputs, weights = seen(), [random(8, 64, seed=1), random(5, 64, seed=2)]
    factors = SmoothQuant(alpha).factors(inputs, [(weight, Target()) for weight in weights])
    peaks = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(factors, inputs.max_abs**alpha / peaks ** (1 - alpha))


def test_smoothquant_makes_activations_of_8_bits_better():
    inputs, weight = seen(), random(12, 64, seed=4)
    inputs.samples[:, 5] *= 40  # an outlier in each token, which int8 has a scale for
    most = inputs.samples.abs().amax(0)
    factors = SmoothQuant().factors(Statistics(300, max_abs=most), [(weight, Target(bits=8))])

    def error(rows: torch.Tensor, weight: torch.Tensor) -> float:
        def rounded(numbers: torch.Tensor) -> torch.Tensor:
            scales = numbers.abs().amax(1, keepdim=True) / 127
            return (numbers / scales).round() * scales

        return float((rounded(rows) @ rounded(weight).T - rows @ weight.T).square().sum())

    rows = inputs.samples
    assert error(rows / factors, weight * factors) < 0.2 * error(rows, weight)


def test_inputs_that_were_never_seen_have_finite_factors():
    mean = torch.ones(64)
    mean[3] = 0
    inputs = Statistics(5, torch.eye(64), mean, max_abs=mean)
    for method in (AWQ(), SmoothQuant()):
        factors = method.factors(inputs, [(random(4, 64), Target())])
        assert torch.isfinite(factors).all() and (factors > 0).all()


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match="awq needs mean activations"):
        AWQ().factors(Statistics(3), [])
    with pytest.raises(ConfigError, match="smoothquant needs the largest"):
        SmoothQuant().factors(Statistics(3), [])
    with pytest.raises(ConfigError, match="needs a Hessian of at least one token"):
        Clipping().quantize(random(2, 64), Statistics(0), Target())
