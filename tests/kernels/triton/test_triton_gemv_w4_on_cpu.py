"""The kernel for one token, without a GPU: where everything lies, and what is rounded."""

from dataclasses import replace

import pytest
import torch
from gluon_on_cpu import load_kernel
from triton_weights import numbers, random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference import NormOptions
from hmt.kernels.triton.gemm.gemv_w4_launch import Norm, Turn, multiply_one, sizes_of

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernel(monkeypatch, "gemv_w4", ("gemv_w4_activations", "gemv_w4_mma"))


def random_tensor(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(BF16)


def weight(rows: int, columns: int, **options: object) -> WeightTensor:
    options = {"spread": False, **options}
    return random_weight(Encoding.INT4_GROUP, rows, columns, device=torch.device("cpu"), **options)


def product(x: torch.Tensor, w: WeightTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found = x.double() @ reference.dequantize(w, torch.float32).double().T
    return (found if bias is None else found + bias.double()).to(BF16)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    size = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=size * 2**-8)


def poisoned(columns: int) -> torch.Tensor:
    return torch.full((1, columns), torch.nan, dtype=BF16)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (1024, {}),
        (1024, {"scale_dtype": torch.float32}),
        (1024, {"group": 64}),
    ],
)
def test_products_side_by_side(columns, options):
    weights = [weight(rows, columns, seed=rows, **options) for rows in (64, 32, 32)]
    biases = [None, random_tensor(32), None]
    x, out = random_tensor(1, columns), poisoned(128)
    x[0, 64:96] = 0
    x[0, 131] *= 1000
    multiply_one(out, x, weights, biases)
    assert_close(
        out, torch.cat([product(x, *pair) for pair in zip(weights, biases, strict=True)], 1)
    )


@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.MXFP4])
@pytest.mark.parametrize("activations", list(Activations))
def test_codes_of_e2m1(encoding, activations):
    weights = [
        random_weight(
            encoding, 32, 1536, device=torch.device("cpu"), seed=seed, activations=activations
        )
        for seed in (1, 2)
    ]
    if encoding is Encoding.NVFP4:
        weights[1] = replace(weights[1], factor=torch.tensor([1.7]))
    x, total = random_tensor(1, 1536), random_tensor(1, 64, seed=2)
    x[0, 64:96] = 0
    x[0, 131] *= 1000
    values = x.double()
    if activations is Activations.INT8_TOKEN:
        codes, scales = reference.quantize_activations(x)
        values = codes.double() * scales.double()[:, None]
    expected = torch.cat([values @ numbers(w).T for w in weights], 1)
    # x is rounded to 16 bits of the largest of 32.
    largest = x.double().abs().view(1, -1, 32).amax(2, keepdim=True).expand(1, -1, 32)
    unit = largest.reshape(1, -1) / (65024 if values.equal(x.double()) else 2**40)
    bound = torch.cat([(unit + values.abs() * 2**-18) @ numbers(w).abs().T for w in weights], 1)
    found = poisoned(64)
    multiply_one(found, x, weights, [None] * 2)
    assert ((found.double() - expected).abs() <= bound * 1.01 + expected.abs() * 2**-8).all()
    also = {(Encoding.NVFP4, Activations.FLOAT), (Encoding.MXFP4, Activations.INT8_TOKEN)}
    if (encoding, activations) not in also:
        return  # what is done with products is the same for each of both
    added = total + found
    multiply_one(total, x, weights, [None] * 2, add=True)
    assert torch.equal(total, added)
    gate = random_weight(encoding, 32, 1536, device=torch.device("cpu"), activations=activations)
    out = poisoned(32)
    multiply_one(out, x, [gate, weights[0]], [None] * 2, activation="silu")
    parts = [(values @ numbers(w).T).to(BF16) for w in (gate, weights[0])]
    assert_close(out, reference.gated(*parts, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_behind_a_norm(activation):
    columns = 1536
    gate, up = (weight(32, columns, seed=seed) for seed in (1, 2))
    x, more, by = (
        random_tensor(*size, seed=3) for size in ((1, columns), (1, columns), (columns,))
    )
    for options in (NormOptions(1e-5), NormOptions(1e-5, 1.0)):
        out, norm = poisoned(32), Norm(by * 0.05, options)
        multiply_one(out, x, [gate, up], [None] * 2, more=more, norm=norm, activation=activation)
        normed = reference.rms_norm(x + more, norm.weight, options.eps, offset=options.offset)
        expected = reference.gated(product(normed, gate), product(normed, up), activation)
        assert_close(out, expected)


@pytest.mark.parametrize("norm", [False, True])
def test_tokens_of_int8(norm):
    w = weight(64, 1536, activations=Activations.INT8_TOKEN)
    x, by, out = random_tensor(1, 1536), random_tensor(1536, seed=3), poisoned(64)
    x[0, 77] *= 100
    given = Norm(by, NormOptions(1e-5)) if norm else None
    multiply_one(out, x, [w], [None], norm=given)
    x = reference.rms_norm(x, by, 1e-5) if norm else x
    codes, scales = reference.quantize_activations(x)
    expected = (codes.double() * scales.double()[:, None]) @ numbers(w).T
    torch.testing.assert_close(
        out, expected.to(BF16), rtol=2**-7, atol=expected.abs().max() * 2**-18
    )


def test_sums():
    w, x = weight(64, 1024), random_tensor(1, 1024)
    total, more = random_tensor(1, 64, seed=2) * 50, random_tensor(1, 64, seed=3) * 50
    expected = total + more + product(x, w)
    multiply_one(total, x, [w], [None], more=more, add=True)
    assert_close(total, expected)


@pytest.mark.parametrize("dim", [32, 64])
def test_heads_that_are_rotated(dim):
    weights = [weight(rows, 1024, seed=rows) for rows in (2 * dim, dim, dim)]
    angle = torch.rand(1, dim // 2).repeat(1, 2) * 6
    x, out, turn = random_tensor(1, 1024), poisoned(4 * dim), Turn(angle.cos(), angle.sin())
    multiply_one(out, x, weights, [None] * 3, turn=turn)
    expected = torch.cat([product(x, w) for w in weights], 1).view(1, 4, dim)
    reference.rope_inplace(expected[:, :2], expected[:, 2:3], turn.cos, turn.sin)
    assert_close(out, expected.view(1, -1))


def test_sizes_take_all_inputs_with_sums_in_one_order():
    for columns in range(1024, 16385, 512):
        for gated, e2m1 in ((False, False), (True, False), (False, True), (True, True)):
            sizes = sizes_of(columns, 32, gated=gated, e2m1=e2m1)
            assert sizes["WARPS"] * sizes["STEPS"] * 256 == columns
            assert sizes["STEPS"] <= sizes["PADDED"] < 2 * sizes["STEPS"]
            others = sizes_of(columns, 128256, gated=gated, e2m1=e2m1)
            assert {**sizes, "SLOTS": 0} == {**others, "SLOTS": 0}
