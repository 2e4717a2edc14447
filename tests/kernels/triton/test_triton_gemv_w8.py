"""One token times int8 weights in rows."""

import math

import pytest
import torch
from triton_weights import assert_is_product, random_weight

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.triton.device_math import interpreted
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm.gemv_w8 import takes_one_row

# Triton's interpreter rounds bf16 wrongly.
KINDS = [torch.float16] if interpreted() else [torch.float16, torch.bfloat16]


def token(columns: int, device: torch.device, kind: torch.dtype, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, columns, generator=random).to(device, kind)


def weight(rows: int, columns: int, device: torch.device, seed: int = 0) -> WeightTensor:
    return random_weight(Encoding.INT8_CHANNEL, rows, columns, device=device, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(70, 512), (32, 1536)])
def test_products(device, kind, rows, columns):
    w, bias = weight(rows, columns, device), token(rows, device, kind, 2)[0]
    x = token(columns, device, kind)
    x[0, 64:96] = 0
    x[0, 131] *= 1000
    assert takes_one_row(x, w)
    for added in (None, bias):
        assert_is_product(kernels.linear(x, w, added), x, w, added)
    total = token(rows, device, kind, 3) * 10
    expected = total + kernels.linear(x, w)
    kernels.linear_add(total, x, w)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_stays_none(device, wrong):
    w, x = weight(40, 512, device), token(512, device, KINDS[-1])
    x[0, 300] = wrong
    assert not kernels.linear(x, w).isfinite().any()


def test_parts_of_a_matrix_have_the_results_of_all(device):
    kind = KINDS[-1]
    counts = (128, 128, 50)
    parts = [weight(count, 512, device, seed=count + n) for n, count in enumerate(counts)]
    x = token(512, device, kind)
    named = {str(n): part for n, part in enumerate(parts)}
    found = kernels.linear_many(x, named, tuple(named))
    whole = kernels.linear_many_float(x, named, tuple(named))
    assert whole.dtype is torch.float32 and torch.equal(whole, found.float())
    two = kernels.linear_many_float(x.repeat(2, 1), named, tuple(named))
    assert two.shape == (2, sum(counts)) and two.dtype is torch.float32
    for part, its in zip(parts, found.split(counts, dim=1), strict=True):
        assert_is_product(its, x, part)
        alone = torch.empty_like(its)
        kernels.linear_into(alone, x, part)
        assert torch.equal(alone, its)


def test_what_the_kernel_does_not_take(device):
    w = weight(32, 512, device)
    assert not takes_one_row(token(512, device, torch.float32), w)
    assert not takes_one_row(token(512, device, torch.float16).repeat(2, 1), w)
    assert not takes_one_row(token(640, device, torch.float16), weight(32, 640, device))
