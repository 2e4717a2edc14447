"""Rounding with a scale search, and GPTQ: what must hold for every weight and input."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError, NumericsError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import ops
from hmt.quant import Format, empty_weight, quantize
from hmt.quant.methods.gptq import GPTQ, output_errors
from hmt.quant.methods.interface import Statistics, Target
from hmt.quant.methods.refit import refit
from hmt.quant.methods.rounding import Rounding, importance, round_weight
from hmt.quant.methods.signround import SignRound

TARGETS = [
    Target(bits=4, group_size=32),
    Target(bits=3, group_size=64),
    Target(bits=2, group_size=16),
    Target(bits=8, group_size=0),
    Target(bits=4, group_size=32, symmetric=False),
    Target(bits=3, group_size=0, symmetric=False),
    Target("nvfp4", group_size=16),
    Target("mxfp4", group_size=32),
]
EACH = pytest.mark.parametrize(
    "target",
    TARGETS,
    ids=lambda t: f"{t.kind}{t.bits}-{t.group_size}{'' if t.symmetric else '-asymmetric'}",
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(inputs: int, seed: int = 0, tokens: int = 300) -> Statistics:
    """Inputs of very different size that depend on each other."""
    mixed = random(inputs // 4, inputs, seed=seed + 1)
    samples = random(tokens, inputs // 4, seed=seed) @ mixed + 0.3 * random(tokens, inputs)
    samples *= torch.exp(random(inputs, seed=seed + 2))
    return Statistics(tokens, hessian=samples.T @ samples, samples=samples)


def error(weight: torch.Tensor, found, inputs: Statistics) -> float:
    """Squared error of the outputs for the samples themselves, in float64."""
    assert inputs.samples is not None
    difference = (found.dequantized() - weight).double()
    return float((inputs.samples.double() @ difference.T).square().sum())


@EACH
def test_codes_and_scales_have_their_forms(target):
    found = round_weight(random(10, 128), target)
    assert found.codes.dtype == torch.int8 and found.codes.shape == (10, 128)
    assert found.scales.shape == (10, 128 // (target.group_size or 128))
    if target.kind == "int":
        half = 1 << target.bits - 1
        assert -half <= int(found.codes.min()) and int(found.codes.max()) < half
        assert torch.equal(found.scales, found.scales.bfloat16().float())
    else:
        assert found.codes.min() >= 0 and found.codes.max() < 16
    assert (found.zero_points is None) == target.symmetric
    difference = (found.dequantized() - random(10, 128)).square().mean()
    assert difference < {8: 1e-4, 4: 0.03, 3: 0.12, 2: 0.3}[target.bits]


@pytest.mark.parametrize(("bits", "form"), [(4, Format(Encoding.INT4_GROUP, 32))])
def test_four_bits_are_those_of_conversion(bits, form):
    weight = random(20, 96)
    target = empty_weight(form, (20, 96))
    quantize(WeightTensor(Encoding.F32, (20, 96), weight), target)
    found = Rounding().quantize(weight, Statistics(0), Target(bits=bits, group_size=32))
    assert torch.equal(found.dequantized(), ops.dequantize(target, torch.float32))


@EACH
def test_chunks_of_rows_change_nothing(target, monkeypatch):
    weight = random(9, 128)
    whole = round_weight(weight, target)
    monkeypatch.setattr("hmt.quant.methods.rounding._CHUNK_NUMBERS", 256)
    assert torch.equal(round_weight(weight, target).dequantized(), whole.dequantized())


@EACH
def test_zeros_stay_zeros(target):
    weight = random(3, 128)
    weight[1] = 0
    assert round_weight(weight, target).dequantized()[1].eq(0).all()


@EACH
def test_weights_of_errors_help_where_they_weigh(target):
    inputs = correlated(128)
    counts = importance(inputs.hessian)
    weight = random(32, 128, seed=5)

    def weighted(found) -> float:
        return float(((found.dequantized() - weight).square() * counts).sum())

    plain, aware = round_weight(weight, target), round_weight(weight, target, counts)
    assert weighted(aware) <= weighted(plain) * 1.001


@EACH
def test_gptq_rounds_to_nearest_where_inputs_do_not_depend_on_each_other(target):
    weight = random(16, 128)
    inputs = Statistics(128, hessian=torch.eye(128) * 128)  # an orthogonal matrix of inputs
    nearest = round_weight(weight, target, torch.ones(128))
    found = GPTQ(sweeps=0).quantize(weight, inputs, target)
    torch.testing.assert_close(found.dequantized(), nearest.dequantized(), rtol=0, atol=0)
    # Other scales may serve the same codes better, and other codes then these scales.
    found = GPTQ(sweeps=2).quantize(weight, inputs, target)
    before = (nearest.dequantized() - weight).square().sum(1)
    assert ((found.dequantized() - weight).square().sum(1) <= before * 1.00001).all()


@EACH
@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_gptq_errs_no_more_than_rounding_in_any_row(target, seed):
    inputs = correlated(128, seed)
    weight = random(12, 128, seed=seed + 9)
    mean = inputs.hessian.double() / inputs.tokens
    mean += torch.eye(128) * mean.diagonal().mean() * GPTQ().damping
    before = output_errors(weight, Rounding(weighted=True).quantize(weight, inputs, target), mean)
    errors = [before]
    for sweeps in (0, 1, 3):
        found = GPTQ(sweeps=sweeps).quantize(weight, inputs, target)
        errors.append(output_errors(weight, found, mean))
    for less, more in zip(errors[1:], errors, strict=False):
        assert (less <= more * 1.0001 + 1e-9).all()


@EACH
def test_gptq_gains_much_where_inputs_depend_on_each_other(target):
    inputs, weight = correlated(128), random(32, 128, seed=3)
    rounded = error(weight, round_weight(weight, target), inputs)
    assert error(weight, GPTQ().quantize(weight, inputs, target), inputs) < 0.7 * rounded


def test_one_pass_is_gptqs_own_arithmetic():
    # Section 3 of the paper, without blocks: after each input the inverse loses it.
    weight, inputs = random(6, 64), correlated(64)
    target = Target(bits=4, group_size=32)
    hessian = inputs.hessian.double() / inputs.tokens
    scales = round_weight(weight, target, importance(hessian))
    steps = scales.steps().double().repeat_interleave(32, 1)
    hessian += torch.eye(64).double() * hessian.diagonal().mean() * 0.01
    inverse, left = hessian.inverse(), weight.double()
    codes = torch.empty(6, 64)
    for at in range(64):
        codes[:, at] = (left[:, at] / steps[:, at]).round().clamp(-8, 7)
        share = (left[:, at] - codes[:, at] * steps[:, at]) / inverse[at, at]
        left = left - share[:, None] * inverse[at]
        inverse = inverse - inverse[:, at, None] * inverse[at] / inverse[at, at]
    expected = replace(scales, codes=codes.to(torch.int8))
    found = GPTQ(act_order=False, sweeps=0).quantize(weight, inputs, target)
    assert torch.equal(found.codes, expected.codes)


@EACH
def test_signed_rounding_errs_less_and_in_no_row_more(target):
    inputs, weight = correlated(128), random(32, 128, seed=3)
    mean = inputs.hessian.double() / inputs.tokens
    before = output_errors(weight, Rounding(weighted=True).quantize(weight, inputs, target), mean)
    made = SignRound(steps=100).quantize(weight, inputs, target)
    after = output_errors(weight, made, mean)
    assert (after <= before * 1.0001).all() and after.sum() < 0.8 * before.sum()
    if target.kind == "int":
        assert torch.equal(made.scales, made.scales.bfloat16().float())


@pytest.mark.parametrize("target", [t for t in TARGETS if t.kind == "int"])
def test_signed_rounding_stays_beside_the_nearest(target):
    inputs, weight = correlated(128), random(8, 128, seed=3)
    start = Rounding(weighted=True).quantize(weight, inputs, target)
    made = SignRound(steps=20).quantize(weight, inputs, target)
    assert ((made.scales / start.scales - 1).abs() <= 0.21).all()
    # A number is at most half a step from its code, and half a step more by its offset; the largest
    # of a grid stand for all beyond.
    steps = made.steps().repeat_interleave(128 // made.scales.shape[1], 1)
    zeros = 0 if target.symmetric else made.zero_points.float().repeat_interleave(
        128 // made.scales.shape[1], 1
    )  # fmt: skip
    codes, exact = made.codes.float(), weight / steps + zeros
    half = 1 << target.bits - 1
    inside = (codes > -half + (target.bits == 8)) & (codes < half - 1)
    assert ((codes - exact).abs()[inside] <= 1.001).all()


def test_signed_rounding_of_floats_takes_one_of_two_neighbours():
    inputs, weight = correlated(128), random(8, 128, seed=3)
    target = Target("mxfp4", group_size=32)
    start = Rounding(weighted=True).quantize(weight, inputs, target)
    made = SignRound(steps=20).quantize(weight, inputs, target)
    assert torch.equal(made.scales, start.scales)  # powers of two
    shares = weight / made.steps().repeat_interleave(32, 1)
    grid = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = made.dequantized() / made.steps().repeat_interleave(32, 1)
    inside = shares.abs() < 6
    at = torch.bucketize(shares[inside], grid, right=True)
    taken = numbers[inside]
    assert ((taken == grid[at - 1]) | (taken == grid[at])).all()
    assert not torch.equal(made.codes, start.codes)


@pytest.mark.parametrize("target", [t for t in TARGETS if t.kind == "int"])
def test_refitted_scales_are_those_of_least_squares(target):
    inputs, weight = correlated(128), random(8, 128, seed=4)
    hessian = inputs.hessian.double() / inputs.tokens
    rounded = round_weight(weight, target)
    found = refit(weight, rounded, hessian)
    assert torch.equal(found.codes, rounded.codes)
    codes = rounded.codes.float() - (0 if target.symmetric else rounded.zero_points.float()
        .repeat_interleave(target.group_size or 128, 1))  # fmt: skip
    root = torch.linalg.cholesky(hessian).T
    for row in range(8):
        groups = torch.block_diag(*codes[row].double().view(len(rounded.scales[row]), 1, -1))
        best = torch.linalg.lstsq(root @ groups.T, root @ weight[row].double()[:, None]).solution
        torch.testing.assert_close(found.scales[row].double(), best[:, 0], rtol=0.01, atol=0.003)


def test_inputs_that_were_never_seen_are_rounded():
    inputs = correlated(64)
    hessian = inputs.hessian.clone()
    hessian[5], hessian[:, 5] = 0, 0
    weight, target = random(8, 64), Target(bits=4, group_size=32)
    found = GPTQ(sweeps=0).quantize(weight, Statistics(300, hessian=hessian), target)
    step = found.steps().abs().repeat_interleave(32, 1)[:, 5]  # may be negative
    assert ((found.dequantized() - weight)[:, 5].abs() <= step * 1.51).all()
    silent = Statistics(3, hessian=torch.zeros(64, 64))
    assert torch.equal(
        GPTQ().quantize(weight, silent, target).codes,
        round_weight(weight, target, torch.ones(64)).codes,
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("int", bits=9), "9 bits were asked for"),
        (Target("int", group_size=48), "groups of 48 do not divide 64"),
        (Target("nvfp4", group_size=32), "nvfp4 has groups of 16"),
        (Target("fp3"), "'fp3' is unknown"),
    ],
)
def test_what_cannot_be_is_said(target, message):
    with pytest.raises(ConfigError, match=message):
        round_weight(random(2, 64), target)


def test_missing_numbers_are_errors():
    weight = random(2, 64)
    with pytest.raises(ConfigError, match="needs a Hessian"):
        GPTQ().quantize(weight, Statistics(5), Target())
    weight[1, 3] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        round_weight(weight, Target())
