"""Weights in ggml's blocks on the GPU, against the reference, which is defined to the bit."""

from dataclasses import replace

import pytest
import torch
from triton_weights import numbers, random_blocks

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.triton.elementwise.rope_gate import gated_pair
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm.block_dots import block_tokens
from hmt.kernels.triton.gemm.block_numbers import block_rows_at

TYPES = list(BLOCK_SHAPES)
# Of each way in which codes lie and are multiplied; the interpreter is slow.
SOME = [Encoding.Q4_K, Encoding.Q6_K, Encoding.Q8_0, Encoding.IQ2_S]


def random_x(tokens: int, columns: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device)


def on_cpu(w: WeightTensor) -> WeightTensor:
    """CUDA divides by 127 by multiplying."""
    return replace(w, data=w.data.cpu(), scales=None if w.scales is None else w.scales.cpu())


def columns_of(encoding: Encoding) -> int:
    """Small blocks: not in whole blocks of 256 activations."""
    return 288 if BLOCK_SHAPES[encoding].numbers == 32 else 512


def assert_equal_but_for_order(found, x, w, bias=None):
    """To the reference, whose integers are the same, and whose f32 sums are in another order."""
    expected = reference.linear(x.cpu(), on_cpu(w), bias).to(x.device)
    magnitude = x.double().abs() @ numbers(w).abs().t()
    assert found.dtype == x.dtype and found.shape == expected.shape
    wrong = ~((found - expected).abs().double() <= 2**-21 * magnitude + 1e-30)
    assert not wrong.any(), (wrong.sum().item(), wrong.nonzero()[0].tolist())


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("encoding", TYPES)
def test_rounded_tokens(device, encoding, tokens):
    if tokens > 1 and device.type != "cuda" and encoding not in SOME:
        tokens = 2  # what is unpacked is the same for all tokens of a program
    columns = columns_of(encoding)
    w = random_blocks(encoding, 19 if tokens < 20 else 3, columns, device=device)
    x = random_x(tokens, columns, device)
    assert_equal_but_for_order(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("encoding", TYPES)
def test_tokens_as_they_are(device, encoding):
    columns = columns_of(encoding)
    w = random_blocks(encoding, 19, columns, device=device, activations=Activations.FLOAT)
    x = random_x(1, columns, device)
    assert_equal_but_for_order(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("encoding", TYPES)
def test_numbers_are_those_of_the_reference(device, encoding):
    w = random_blocks(encoding, 19, columns_of(encoding), device=device)
    rows = slice(3, 18)
    for dtype in (torch.float32, torch.float16) if encoding in SOME else (torch.float32,):
        expected = reference.dequantize(on_cpu(w), dtype, rows).to(device)
        assert torch.equal(kernels.dequantize(w, dtype, rows), expected)


@pytest.mark.parametrize("encoding", TYPES)
def test_rows_that_are_looked_up(device, encoding):
    columns = BLOCK_SHAPES[encoding].numbers * 3
    parts = [random_blocks(encoding, rows, columns, device=device, seed=rows) for rows in (32, 19)]
    ids = torch.tensor([31, 50, 31], device=device)
    places = [torch.tensor([w.data.data_ptr() for w in parts], device=device)]
    places.append(
        torch.tensor([0 if w.scales is None else w.scales.data_ptr() for w in parts], device=device)
    )
    found = block_rows_at(*places, 32, columns, encoding, torch.float32, ids)
    expected = torch.cat([reference.dequantize(w, torch.float32) for w in parts])[ids]
    assert torch.equal(found, expected)


def test_activations_are_rounded_as_the_reference_rounds(device):
    for columns in (256, 1312):
        x = random_x(3, columns, device).mul(torch.tensor([1e-6, 1.0, 1e6])[:, None].to(device))
        x[1, :256] = 0
        tokens = block_tokens(x, rounded=True)
        codes, scales = reference.quantize_activation_blocks(x.cpu())
        found = tokens.numbers.permute(0, 2, 1, 3).flatten(1).cpu()
        assert torch.equal(found[:, :columns], codes) and not found[:, columns:].any()
        assert torch.equal(tokens.scales.cpu(), scales)
        sums = tokens.sums.transpose(1, 2).flatten(1).cpu()[:, : columns // 16]
        assert torch.equal(sums, codes.view(3, -1, 16).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("activations", [Activations.FLOAT, Activations.INT8_BLOCK])
def test_results_do_not_depend_on_other_tokens(device, activations):
    w = random_blocks(Encoding.Q5_K, 16, 1024, device=device, activations=activations)
    x = random_x(5, 1024, device)
    alone = torch.cat([kernels.linear(one[None], w) for one in x])
    assert torch.equal(kernels.linear(x, w), alone)


@pytest.mark.parametrize("encoding", SOME)
def test_many_tokens(device, encoding):
    w = random_blocks(encoding, 21, 512, device=device)
    x, bias = random_x(70, 512, device), random_x(1, 21, device, seed=2)[0]
    expected = x.double() @ numbers(w).t() + bias.double()
    magnitude = x.double().abs() @ numbers(w).abs().t() + bias.double().abs()
    found = kernels.linear(x, w, bias)
    assert ((found.double() - expected).abs() <= 2**-20 * magnitude).all()


def test_several_weights_side_by_side(device):
    kinds = {"q": Encoding.Q4_K, "k": Encoding.Q4_K, "v": Encoding.Q6_K, "z": Encoding.Q6_K}
    params: dict[str, WeightTensor] = {
        name: random_blocks(kind, rows, 512, device=device, seed=rows)
        for (name, kind), rows in zip(kinds.items(), (35, 16, 7, 20), strict=True)
    }
    params["k_bias"] = WeightTensor(Encoding.F32, (16,), random_x(1, 16, device, seed=3)[0])
    params["z_bias"] = WeightTensor(Encoding.F32, (20,), random_x(1, 20, device, seed=4)[0])
    x = random_x(2, 512, device)
    found = kernels.linear_many(x, params, tuple(kinds))
    parts = [
        kernels.linear(x, params[n], params[f"{n}_bias"].data if n in "kz" else None) for n in kinds
    ]
    assert torch.equal(found, torch.cat(parts, dim=1))


def test_what_is_made_of_products(device):
    params = {
        "gate": random_blocks(Encoding.Q4_K, 35, 256, device=device, seed=1),
        "up": random_blocks(Encoding.Q4_K, 35, 256, device=device, seed=2),
    }
    x = random_x(2, 256, device) / 50
    gated = kernels.linear_gated(x, params, ("gate", "up"), "silu")
    pair = kernels.linear_many(x, params, ("gate", "up"))
    assert torch.allclose(gated, gated_pair(pair, "silu"), rtol=1e-6, atol=1e-6)
    total = random_x(2, 35, device, seed=5)
    expected = total + kernels.linear(x, params["up"])
    kernels.linear_add(total, x, params["up"])
    assert torch.equal(total, expected)
