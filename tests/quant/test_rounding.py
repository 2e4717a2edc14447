"""Rounding to codes: bounds of the error, exactness, and input at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import NumericsError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import ops
from hmt.quant import Format, empty_weight, quantize

INT8 = Format(Encoding.INT8_CHANNEL)
INT8_GROUPS = Format(Encoding.INT8_GROUP, 32)
NVFP4 = Format(Encoding.NVFP4, 16)
MXFP4 = Format(Encoding.MXFP4, 32)


def int4(group: int = 32) -> Format:
    return Format(Encoding.INT4_GROUP, group)


def rounded(weight: torch.Tensor, form: Format) -> WeightTensor:
    names = {torch.float32: Encoding.F32, torch.bfloat16: Encoding.BF16}
    target = empty_weight(form, tuple(weight.shape))
    quantize(WeightTensor(names[weight.dtype], tuple(weight.shape), weight), target)
    return target


def back(w: WeightTensor) -> torch.Tensor:
    return ops.dequantize(w, torch.float32)


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 99), st.integers(-30, 30))
@settings(max_examples=50, deadline=None)
def test_int8_is_at_most_half_a_step_off(rows, columns, seed, power):
    weight = random(rows, columns, seed) * 10.0**power
    w = rounded(weight, INT8)
    error = (back(w).double() - weight.double()).abs()
    assert (error <= w.scales.double()[:, None] * 0.50001).all()


@given(
    group=st.sampled_from([32, 64, 128]),
    groups=st.integers(1, 5),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
    power=st.integers(-30, 30),
)
@settings(max_examples=50, deadline=None)
def test_int4_is_never_worse_than_plain_rounding(group, groups, rows, seed, power):
    weight = random(rows, group * groups, seed) * 10.0**power
    values = weight.view(-1, group).double()
    scale = values.abs().amax(1, keepdim=True) / 7
    plain = ((values / scale).round() * scale - values).square().sum(1)
    found = (back(rounded(weight, int4(group))).view(-1, group).double() - values).square().sum(1)
    # Nearly always, group by group, it is better; no group is much worse.
    assert found.sum() <= plain.sum() * 1.02
    assert (found <= plain * 1.5).all()


def test_int4_error_on_normal_numbers():
    weight = random(256, 1024)
    values = weight.view(-1, 32)
    scale = values.abs().amax(1, keepdim=True) / 7
    plain = ((values / scale).round() * scale - values).square().sum()
    assert (back(rounded(weight, int4())) - weight).square().sum() < 0.72 * plain


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_int4_can_represent_is_kept(group, sign):
    codes = torch.randint(-8, 8, (20, group), generator=torch.Generator().manual_seed(group))
    codes[:, 5] = -8  # so that the scale is the only one that fits
    weight = codes * (2.0 ** torch.arange(-10, 10)[:, None] * sign)
    assert torch.equal(back(rounded(weight, int4(group))), weight)


def test_what_int8_can_represent_is_kept():
    codes = torch.randint(-127, 128, (20, 37), generator=torch.Generator().manual_seed(0))
    codes[:, 3] = 127
    weight = codes * 2.0 ** torch.arange(-10, 10)[:, None]
    assert torch.equal(back(rounded(weight, INT8)), weight)


@pytest.mark.parametrize(
    "form",
    [INT8, INT8_GROUPS, int4(), NVFP4, MXFP4],
    ids=["int8", "int8-group", "int4", "nvfp4", "mxfp4"],
)
def test_zeros_stay_zeros(form):
    weight = random(4, 64)
    weight[1] = 0
    weight[2, 32:] = 0
    found = back(rounded(weight, form))
    assert found[1].eq(0).all() and found[2, 32:].eq(0).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("form", [INT8, int4()], ids=["int8", "int4"])
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e38, 3.4e38])
def test_numbers_at_the_ends_of_the_range(form, size):
    weight = torch.full((2, 32), size)
    weight[1, ::2] = -size
    found = back(rounded(weight, form))
    assert found.isfinite().all()
    # Denormal scales are rounded to multiples of 2^-149 (bf16: 2^-133), and codes multiply that.
    step = 128 * 2.0**-149 if form is INT8 else 8 * 2.0**-133
    torch.testing.assert_close(found, weight, rtol=0.08, atol=step)


FORMS = pytest.mark.parametrize(
    "form",
    [INT8, INT8_GROUPS, int4(), NVFP4, MXFP4],
    ids=["int8", "int8-group", "int4", "nvfp4", "mxfp4"],
)


@pytest.mark.parametrize(("form", "group"), [(NVFP4, 16), (MXFP4, 32)], ids=["nvfp4", "mxfp4"])
def test_fp4_is_as_near_as_its_grid_allows(form, group):
    weight = random(64, 512)
    found = back(rounded(weight, form))
    peaks = weight.view(-1, group).abs().amax(1, keepdim=True)
    error = (found - weight).view(-1, group).abs()
    # The widest step of e2m1 is 2 of 6; a power of two may leave the peak a third above 6.
    assert (error <= peaks * 0.26).all()
    assert (found - weight).square().mean() < (0.011 if form is NVFP4 else 0.016)


@pytest.mark.parametrize("form", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_what_fp4_can_represent_is_kept(form):
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    weight = numbers[codes] * (2.0 ** torch.arange(-8, 8))[:, None]
    weight[:, ::16] = 6 * (2.0 ** torch.arange(-8, 8))[:, None]
    weight[::2] = -weight[::2]
    assert torch.equal(back(rounded(weight, form)), weight)


@FORMS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_an_error(form, bad):
    weight = random(70, 64).bfloat16()
    weight[69, 63] = bad
    with pytest.raises(NumericsError, match="hold NaN or infinite"):
        rounded(weight, form)


@FORMS
def test_rows_do_not_depend_on_the_chunks(form, monkeypatch):
    weight = random(50, 96)
    whole = rounded(weight, form)
    monkeypatch.setattr("hmt.quant.rtn._CHUNK_NUMBERS", 7 * 96)
    parts = rounded(weight, form)
    assert torch.equal(back(parts), back(whole))


@FORMS
def test_fp8_blocks_can_be_rounded_again(form):
    codes = random(70, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    source = WeightTensor(Encoding.FP8_BLOCK, (70, 96), codes, scales, tile=(32, 40))
    target = empty_weight(form, (70, 96))
    quantize(source, target)
    expected = rounded(ops.dequantize(source, torch.float32), form)
    assert torch.equal(back(target), back(expected))
