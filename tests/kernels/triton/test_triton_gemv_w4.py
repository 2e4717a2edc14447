"""One token times int4 weights, with what is computed around it in the same launch, on Hopper."""

import math

import pytest
import torch
from triton_weights import assert_is_product as assert_is_rounded_product
from triton_weights import random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference import AttentionInputs, FeedForward, NormOptions
from hmt.kernels.triton import fused_layers
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm import gemv_w4_launch
from hmt.kernels.triton.gemm.gemv_w4_launch import Norm, multiply_one

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is for Hopper, and no interpreter takes it",
)
BF16 = torch.bfloat16


def random_tensor(*sizes: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device).to(BF16)


def weight(rows: int, columns: int, device: torch.device, **options: object) -> WeightTensor:
    return random_weight(Encoding.INT4_GROUP, rows, columns, device=device, **options)


def plain(values: torch.Tensor) -> WeightTensor:
    return WeightTensor(Encoding.BF16, tuple(values.shape), values)


def exact(w: WeightTensor) -> torch.Tensor:
    return reference.dequantize(w, torch.float32).double()


def assert_is_product(
    found: torch.Tensor, x: torch.Tensor, w: WeightTensor, bias: torch.Tensor | None = None
) -> None:
    """But for the rounding of x to 16 bits of the largest of 32, of f32 sums, and of the result."""
    numbers, values = exact(w), x.double()
    largest = values.abs().view(1, -1, 32).amax(2, keepdim=True).expand(1, -1, 32).reshape(1, -1)
    size = values.abs() @ numbers.abs().T
    expected = values @ numbers.T
    if bias is not None:
        expected = expected + bias.double()
        size = size + bias.double().abs()
    rounding = (largest / 65024) @ numbers.abs().T
    error = (found.double() - expected).abs()
    bound = expected.abs() * 2**-8 + size * 2**-18 + rounding * 1.01
    assert (error <= bound).all(), (error / bound).max().item()


@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        (32, 1024, 32),
        (96, 3072, 32),
        (64, 2048, 64),
        (128, 14336, 32),
        (32, 4096, 128),
        (64, 5120, 32),
    ],
)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_products(device, rows, columns, group, scale_dtype):
    w = weight(rows, columns, device, group=group, scale_dtype=scale_dtype)
    bias = random_tensor(rows, device=device, seed=9)
    for large in (1.0, 1e-20, 1e15):
        x = random_tensor(1, columns, device=device) * large
        x[0, 64:96] = 0
        x[0, 131] *= 1000
        assert gemv_w4_launch.takes_one_token(x, [w])
        for added in (None, bias):
            assert_is_product(kernels.linear(x, w, added), x, w, added)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(device, wrong):
    w, x = weight(64, 1024, device), random_tensor(1, 1024, device=device)
    x[0, 700] = wrong
    assert not kernels.linear(x, w).isfinite().any()


def test_a_result_is_the_same_each_time(device):
    w, x = weight(128, 14336, device), random_tensor(1, 14336, device=device)
    first = kernels.linear(x, w)
    assert all(torch.equal(kernels.linear(x, w), first) for _ in range(20))


@pytest.mark.parametrize("count", [2, 3])
def test_weights_side_by_side(device, count):
    params = {str(i): weight(32 * (i + 1), 2048, device, seed=i) for i in range(count)}
    params["1_bias"] = plain(random_tensor(64, device=device, seed=7))
    x = random_tensor(1, 2048, device=device)
    found = kernels.linear_many(x, params, tuple(str(i) for i in range(count)))
    parts = [
        kernels.linear(x, params[str(i)], params["1_bias"].data if i == 1 else None)
        for i in range(count)
    ]
    assert torch.equal(found, torch.cat(parts, 1))


def test_sums(device):
    w, x = weight(96, 1024, device), random_tensor(1, 1024, device=device)
    total = random_tensor(1, 96, device=device, seed=3) * 100
    expected = total + kernels.linear(x, w)
    kernels.linear_add(total, x, w)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("width", "inner"), [(1024, 2048), (5120, 1024)])
def test_feed_forward(device, width, inner, activation, offset):
    options = {"spread": False}
    params = {"norm": plain(random_tensor(width, device=device) * 0.05)}
    for name, rows, columns in (
        ("gate", inner, width), ("up", inner, width), ("down", width, inner),
    ):  # fmt: skip
        params[f"{name}_proj"] = weight(rows, columns, device, seed=rows + columns, **options)
        params[f"{name}_proj_bias"] = plain(random_tensor(rows, device=device, seed=5))
    layer = FeedForward(activation, NormOptions(1e-5, offset))
    hidden = random_tensor(1, width, device=device)
    for x in (None, random_tensor(1, width, device=device, seed=4)):
        found, expected = hidden.clone(), hidden.clone()
        assert fused_layers._is_one_token(found, x, params, layer)
        fused_layers.feed_forward(found, x, params, layer)
        reference.feed_forward(expected, x, params, layer)
        size = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=size * 2**-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "angles"), [
    (4, 2, 128, 128), (3, 1, 64, 64), (2, 1, 256, 256), (2, 2, 128, 64), (4, 4, 32, 32),
])  # fmt: skip
@pytest.mark.parametrize("head_norm", [None, NormOptions(1e-6)])
def test_attention_inputs(device, heads, kv_heads, dim, angles, head_norm):
    width = 1024
    params = {"norm": plain(random_tensor(width, device=device))}
    for seed, name in enumerate(("q", "k", "v")):
        rows = dim * (heads if name == "q" else kv_heads)
        params[f"{name}_proj"] = weight(rows, width, device, seed=seed, spread=False)
        params[f"{name}_proj_bias"] = plain(random_tensor(rows, device=device, seed=seed))
        params[f"{name}_norm"] = plain(random_tensor(dim, device=device, seed=seed))
    layer = AttentionInputs(heads, kv_heads, dim, NormOptions(1e-5), head_norm)
    angle = torch.rand(1, angles // 2, device=device).repeat(1, 2) * 6
    hidden = random_tensor(1, width, device=device) * 3
    found = fused_layers.attention_inputs(hidden, params, layer, angle.cos(), angle.sin())
    expected = reference.attention_inputs(hidden, params, layer, angle.cos(), angle.sin())
    size = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=size * 2**-7)


@pytest.mark.parametrize("columns", [1536, 7168, 16384])
def test_tokens_of_int8(device, columns):
    options = {"spread": False, "activations": Activations.INT8_TOKEN}
    gate, up = (weight(64, columns, device, seed=seed, **options) for seed in (1, 2))
    x, by = random_tensor(1, columns, device=device), random_tensor(columns, device=device, seed=3)
    x[0, 131] *= 100
    assert gemv_w4_launch.takes_one_token(x, [gate, up])
    found = kernels.linear(x, gate)
    assert_is_rounded_product(found, x, gate)
    total = random_tensor(1, 64, device=device, seed=4) * 50
    expected = total + found
    kernels.linear_add(total, x, gate)
    assert torch.equal(total, expected)
    out, norm = x.new_empty(1, 128), Norm(by, NormOptions(1e-5))
    multiply_one(out, x, [gate, up], [None, None], norm=norm)
    normed = reference.rms_norm(x, by, 1e-5)
    for part, w in zip(out.split(64, 1), (gate, up), strict=True):
        torch.testing.assert_close(part, kernels.linear(normed, w), rtol=2**-6, atol=0.02)
    if columns == 7168:  # others have too few steps, or too many
        params = {"gate": gate, "up": up}
        found = kernels.linear_gated(x, params, ("gate", "up"), "silu")
        pair = reference.gated(kernels.linear(x, gate), kernels.linear(x, up), "silu")
        torch.testing.assert_close(found, pair, rtol=2**-6, atol=1e-3)


def test_what_the_kernel_does_not_take(device):
    x = random_tensor(1, 1024, device=device)
    assert not gemv_w4_launch.takes_one_token(x, [weight(48, 1024, device)])
    assert not gemv_w4_launch.takes_one_token(x, [weight(32, 1024, device, offsets="zeros")])
    assert not gemv_w4_launch.takes_one_token(x.repeat(2, 1), [weight(32, 1024, device)])
    assert not gemv_w4_launch.takes_one_token(x.half(), [weight(32, 1024, device)])
    for columns in (512, 1056, 28672):
        x = random_tensor(1, columns, device=device)
        assert not gemv_w4_launch.takes_one_token(x, [weight(32, columns, device)])
