"""Parts of a layer in few launches, against the reference's chains of operations."""

import math

import pytest
import torch
from triton_weights import EPSILON, assert_is_product, random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference import AttentionInputs, FeedForward, NormOptions
from hmt.kernels.triton import fused_layers
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm import skinny_launch

WIDTH, INNER = 64, 96
KINDS = [
    (Encoding.INT4_GROUP, Activations.FLOAT),
    (Encoding.INT4_GROUP, Activations.INT8_TOKEN),
    (Encoding.NVFP4, Activations.FLOAT),
    (Encoding.INT8_CHANNEL, Activations.FLOAT),
    (Encoding.INT8_CHANNEL, Activations.INT8_TOKEN),
]


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """The interpreter multiplies bf16 wrongly."""
    return [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]


def random_tensor(*sizes: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device)


def plain(values: torch.Tensor) -> WeightTensor:
    encoding = {torch.float16: Encoding.F16, torch.bfloat16: Encoding.BF16}[values.dtype]
    return WeightTensor(encoding, tuple(values.shape), values)


def projection(
    encoding: Encoding, rows: int, columns: int, device: torch.device, **options: object
) -> WeightTensor:
    return random_weight(encoding, rows, columns, device=device, spread=False, **options)


@pytest.mark.parametrize(("encoding", "activations"), KINDS)
@pytest.mark.parametrize(
    ("tokens", "activation", "biased"),
    [(1, "silu", False), (3, "gelu_tanh", True), (17, "gelu", False)],
)
def test_feed_forward(device, encoding, activations, tokens, activation, biased):
    for dtype in dtypes_of(device):
        # Small, so that activations are neither 0 nor the number itself.
        params = {"norm": plain((random_tensor(WIDTH, device=device) * 0.02).to(dtype))}
        sizes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        for seed, (name, size) in enumerate(sizes.items()):
            options = {"activations": activations, "seed": seed}
            params[f"{name}_proj"] = projection(encoding, *size, device, **options)
            if biased:
                bias = random_tensor(size[0], device=device, seed=seed + 5).to(dtype)
                params[f"{name}_proj_bias"] = plain(bias)
        layer = FeedForward(activation, NormOptions(1e-5))
        hidden = random_tensor(tokens, WIDTH, device=device).to(dtype)
        x = random_tensor(tokens, WIDTH, device=device, seed=2).to(dtype)
        for added in (x, None):
            found, expected = hidden.clone(), hidden.clone().cpu()
            fused_layers.feed_forward(found, added, params, layer)
            there = {name: _moved(w) for name, w in params.items()}
            reference.feed_forward(expected, None if added is None else added.cpu(), there, layer)
            size = expected.abs().max().item()
            torch.testing.assert_close(
                found.cpu(), expected, rtol=8 * EPSILON[dtype], atol=16 * EPSILON[dtype] * size
            )


def test_feed_forward_with_a_norm_of_its_result(device):
    params = {
        "norm": plain((random_tensor(WIDTH, device=device) * 0.02 - 1).half()),
        "post_norm": plain(random_tensor(WIDTH, device=device, seed=7).half()),
        "gate_proj": projection(Encoding.NVFP4, INNER, WIDTH, device),
        "up_proj": projection(Encoding.NVFP4, INNER, WIDTH, device, seed=3),
        "down_proj": projection(Encoding.NVFP4, WIDTH, INNER, device, seed=4),
    }
    layer = FeedForward("gelu_tanh", NormOptions(1e-6, 1.0), NormOptions(1e-6, 1.0))
    hidden = random_tensor(2, WIDTH, device=device).half()
    found, expected = hidden.clone(), hidden.clone()
    fused_layers.feed_forward(found, None, params, layer)
    reference.feed_forward(expected, None, params, layer)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dim", "turned"), [(32, 32), (32, 16), (48, 32)])
@pytest.mark.parametrize("normed", [True, False])
def test_attention_inputs(device, offset, dim, turned, normed):
    heads, kv_heads, tokens = 3, 2, 2
    for dtype in dtypes_of(device):
        params = {
            "norm": plain(random_tensor(WIDTH, device=device).to(dtype)),
            "q_norm": plain(random_tensor(dim, device=device, seed=8).to(dtype)),
            "k_norm": plain(random_tensor(dim, device=device, seed=9).to(dtype)),
        }
        for seed, (name, count) in enumerate((("q", heads), ("k", kv_heads), ("v", kv_heads))):
            params[f"{name}_proj"] = projection(
                Encoding.INT4_GROUP, count * dim, WIDTH, device, seed=seed
            )
        norm = NormOptions(1e-6, offset)
        layer = AttentionInputs(heads, kv_heads, dim, norm, norm if normed else None)
        angles = random_tensor(tokens, turned // 2, device=device, seed=6).repeat(1, 2)
        hidden = random_tensor(tokens, WIDTH, device=device).to(dtype)
        found = fused_layers.attention_inputs(hidden, params, layer, angles.cos(), angles.sin())
        expected = reference.attention_inputs(hidden, params, layer, angles.cos(), angles.sin())
        size = expected.abs().max().item()
        torch.testing.assert_close(
            found, expected, rtol=8 * EPSILON[dtype], atol=8 * EPSILON[dtype] * size
        )


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("tokens", [1, 9])
def test_parts_of_one_matrix(device, activations, tokens):
    """In one launch, with the bits that each part has alone."""
    rows = (128, 128, 70)
    weights = [
        random_weight(
            Encoding.INT8_CHANNEL, count, 96, device=device, activations=activations, seed=seed
        )
        for seed, count in enumerate(rows)
    ]
    params = {str(number): w for number, w in enumerate(weights)}
    for dtype in dtypes_of(device):
        x = random_tensor(tokens, 96, device=device).to(dtype)
        for names in (("0", "1", "2"), ("0", "1"), ("1", "0", "2")):
            found = kernels.linear_many(x, params, names)
            column = 0
            for name in names:
                part = found[:, column : column + params[name].shape[0]]
                assert_is_product(part, x, params[name])
                alone = torch.full_like(part, math.nan)
                kernels.linear_into(alone, x, params[name])
                assert torch.equal(part, alone)
                column += part.shape[1]
            assert column == found.shape[1]


def test_four_bit_parts_have_the_bits_that_each_has_alone(device, monkeypatch):
    monkeypatch.setattr(skinny_launch, "_SOME_ROWS", 100)  # so that three have other block sizes
    weights = [
        random_weight(Encoding.INT4_GROUP, rows, 288, device=device, seed=rows)
        for rows in (64, 48, 32, 16)
    ]
    params = {str(number): w for number, w in enumerate(weights)}
    for dtype in dtypes_of(device):
        x = random_tensor(1, 288, device=device).to(dtype)
        found, column = kernels.linear_many(x, params, tuple(params)), 0
        for w in weights:
            alone = torch.full((1, w.shape[0]), math.nan, dtype=dtype, device=device)
            kernels.linear_into(alone, x, w)
            assert torch.equal(found[:, column : column + w.shape[0]], alone)
            column += w.shape[0]


def _moved(w: WeightTensor) -> WeightTensor:
    parts = {}
    for name in ("data", "scales", "zeros", "minima", "factor"):
        part = getattr(w, name)
        parts[name] = None if part is None else part.cpu()
    return WeightTensor(
        w.encoding,
        w.shape,
        group_size=w.group_size,
        tile=w.tile,
        activations=w.activations,
        **parts,
    )
