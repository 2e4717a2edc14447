"""One token times weights that are numbers in rows."""

import math

import pytest
import torch
from triton_weights import EPSILON, FLOATS, numbers, random_weight

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.triton.device_math import interpreted
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm import gemv_mma
from hmt.kernels.triton.gemm.gemv_float import takes_numbers
from hmt.kernels.triton.single_tokens import single_tokens

# Triton's interpreter rounds to bf16 by cutting off.
KINDS = [torch.float32, torch.float16, *([] if interpreted() else [torch.bfloat16])]
HALVES = [(Encoding.F16, torch.float16), (Encoding.BF16, torch.bfloat16)][: len(KINDS) - 1]
WEIGHTS = [(kind, {}) for kind in FLOATS]
WEIGHTS += [
    (Encoding.FP8_BLOCK, {"tile": tile}) for tile in ((32, 64), (128, 48), (1, 1040), (128, 4096))
]


def token(columns: int, device: torch.device, kind: torch.dtype, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, columns, generator=random).to(device, kind)


def assert_is_sum(
    found: torch.Tensor, x: torch.Tensor, w: WeightTensor, bias: torch.Tensor | None = None
) -> None:
    """No weight is rounded: only sums in f32, and the result."""
    expected, size = x.double() @ numbers(w).t(), x.double().abs() @ numbers(w).abs().t()
    if bias is not None:
        expected = expected + bias.double()
    assert found.dtype == x.dtype
    bound = EPSILON[x.dtype] / 2 * expected.abs() + 2**-20 * size
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("encoding", "options"), WEIGHTS)
@pytest.mark.parametrize(("rows", "columns"), [(70, 1024), (33, 1040)])
def test_products(device, encoding, options, rows, columns):
    w = random_weight(encoding, rows, columns, device=device, **options)
    for kind in KINDS:
        x, bias = token(columns, device, kind), token(rows, device, kind, 2)[0]
        x[0, 131] *= 30
        assert takes_numbers(x, w)
        for added in (None, bias):
            assert_is_sum(kernels.linear(x, w, added), x, w, added)
        total = token(rows, device, kind, 3) * 10
        product = kernels.linear(x, w)
        expected = total + product
        kernels.linear_add(total, x, w)
        # A GPU may scale and add in one instruction, which does not round in between.
        fused = kind is torch.float32 and encoding is Encoding.FP8_BLOCK
        bound = 2**-23 * (product.abs() + expected.abs()) if fused else 0
        assert ((total - expected).abs() <= bound).all()


@pytest.mark.parametrize(("encoding", "kind"), HALVES)
@pytest.mark.parametrize(("rows", "columns"), [(20, 1032), (13, 2056)])
def test_products_of_several_tokens_on_tensor_cores(
    device, encoding, kind, rows, columns, monkeypatch
):
    """Whose sums are the same in any company; of what lies beside them nothing changes."""
    monkeypatch.setattr(gemv_mma, "_FEWEST_ROWS", 0)
    w = random_weight(encoding, rows, columns, device=device)
    bias = token(rows, device, kind, 2)[0]
    random = torch.Generator().manual_seed(3)
    with single_tokens():
        for tokens in (2, 9) if interpreted() else (1, 2, 4, 5, 8, 13, 16):
            x = torch.randn(tokens, columns + 8, generator=random).to(device, kind)[:, :columns]
            assert gemv_mma.takes_mma(x, w)
            found = kernels.linear(x, w, bias)
            assert_is_sum(found, x, w, bias)
            alone = [kernels.linear(row, w, bias) for row in x.split(1)]
            assert torch.equal(found, torch.cat(alone))
            total = torch.randn(tokens, rows, generator=random).to(device, kind)
            expected = total + kernels.linear(x, w)
            kernels.linear_add(total, x, w)
            assert torch.equal(total, expected)
            larger = torch.full((tokens, rows + 6), math.nan, dtype=kind, device=device)
            kernels.linear_into(larger[:, 3 : rows + 3], x, w)
            assert torch.equal(larger[:, 3 : rows + 3], kernels.linear(x, w))
            assert larger[:, :3].isnan().all() and larger[:, rows + 3 :].isnan().all()
    odd = torch.randn(2 * columns + 3, generator=random).to(device, kind)[3:].view(2, columns)
    assert torch.equal(kernels.linear(odd, w), kernels.linear(odd.clone(), w))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", [(16, 8, 24), (16, 16, 16, 5)])
def test_several_weights_at_once_have_the_results_of_each(device, sizes, biased, monkeypatch):
    monkeypatch.setattr(gemv_mma, "_FEWEST_ROWS", 0)
    encoding, kind = HALVES[-1]
    params = {
        str(n): random_weight(encoding, rows, 520, device=device, seed=n)
        for n, rows in enumerate(sizes)
    }
    added = {name: token(len(w.data), device, kind, 4)[0] for name, w in params.items() if biased}
    params |= {f"{n}_bias": WeightTensor(encoding, tuple(b.shape), b) for n, b in added.items()}
    names = tuple(map(str, range(len(sizes))))
    weights = [params[name] for name in names]
    x = torch.cat([token(520, device, kind, seed) for seed in (5, 6, 7)])
    assert gemv_mma.take_mma_at_once(x, weights, [added.get(name) for name in names]) == len(names)
    expected = [kernels.linear(x, params[name], added.get(name)) for name in names]
    assert torch.equal(kernels.linear_many(x, params, names), torch.cat(expected, 1))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_stays_none(device, wrong):
    for encoding in (Encoding.F16, Encoding.FP8_BLOCK):
        w, x = random_weight(encoding, 40, 512, device=device), token(512, device, KINDS[-1])
        x[0, 300] = wrong
        assert not kernels.linear(x, w).isfinite().any()


def test_parts_of_a_matrix_have_the_results_of_all(device):
    whole = random_weight(Encoding.F16, 100, 512, device=device)
    x = token(512, device, KINDS[-1])
    parts = {str(n): part for n, part in enumerate(whole.data.split((48, 52)))}
    params = {name: WeightTensor(Encoding.F16, tuple(p.shape), p) for name, p in parts.items()}
    found = kernels.linear_many(x, params, tuple(params))
    assert torch.equal(found, kernels.linear(x, whole))
    larger = torch.full((1, 60), math.nan, dtype=x.dtype, device=device)
    kernels.linear_into(larger[:, 5:53], x, params["0"])
    assert torch.equal(larger[:, 5:53], found[:, :48])
    assert larger[:, :5].isnan().all() and larger[:, 53:].isnan().all()


def test_what_the_kernel_does_not_take(device):
    w = random_weight(Encoding.F16, 32, 512, device=device)
    x = token(512, device, torch.float16)
    assert not takes_numbers(x.repeat(2, 1), w)
    assert not takes_numbers(x, random_weight(Encoding.INT8_CHANNEL, 32, 512, device=device))
    assert not takes_numbers(x[:, :508], random_weight(Encoding.F16, 32, 508, device=device))
    odd = random_weight(Encoding.FP8_BLOCK, 32, 512, device=device, tile=(16, 256))
    assert not takes_numbers(x, odd)
