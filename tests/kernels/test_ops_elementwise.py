"""Norm, rotary embedding and gated activation against transformers' own modules."""

import pytest
import torch
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as partial_rope
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hmt.base.errors import ConfigError
from hmt.kernels import fused_ops, ops, reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize(("module", "offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_rms_norm_equals_transformers(dtype, module, offset):
    norm = module(48, eps=1e-5).to(dtype)
    norm.weight.data = random(48).to(dtype)
    x = (random(7, 48, seed=1) * 30).to(dtype)
    weight = norm.weight.data
    assert torch.equal(reference.rms_norm(x, weight, 1e-5, offset=offset), norm(x))
    # Other kernels add the squares in another order.
    last_place = torch.finfo(dtype).eps
    found = ops.rms_norm(x, weight, 1e-5, offset=offset)
    torch.testing.assert_close(found, norm(x), rtol=4 * last_place, atol=0)


def test_rms_norm_works_per_head_and_keeps_the_dtype_of_x():
    x = random(5, 4, 16).bfloat16()
    found = ops.rms_norm(x, torch.ones(16), 1e-6)
    assert found.shape == x.shape and found.dtype == torch.bfloat16
    mean_square = found.float().pow(2).mean(-1)
    torch.testing.assert_close(mean_square, torch.ones(5, 4), atol=0.02, rtol=0)


def angles(tokens: int, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(tokens)[:, None] * 10 ** -torch.linspace(0, 3, rot // 2)
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


def as_transformers(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None]  # [1, heads, tokens, dim]


@DTYPES
@pytest.mark.parametrize(
    ("theirs", "rot", "interleaved"),
    [
        (apply_rotary_pos_emb, 32, False),
        (partial_rope, 8, False),
        (apply_rotary_pos_emb_interleave, 32, True),
    ],
    ids=["llama", "glm4, partial", "deepseek, interleaved"],
)
def test_rope_equals_transformers(dtype, theirs, rot, interleaved):
    q, k = random(6, 4, 32).to(dtype), random(6, 2, 32, seed=1).to(dtype)
    cos, sin = angles(6, rot)
    expected = theirs(
        as_transformers(q), as_transformers(k), cos.to(dtype)[None], sin.to(dtype)[None]
    )
    for x, other in zip((q, k), expected, strict=True):
        found = ops.rope(x, cos, sin, interleaved=interleaved)
        assert found.dtype == dtype
        assert torch.equal(as_transformers(found), other)


def test_interleaved_rope_rotates_the_first_numbers_and_passes_the_rest():
    x = random(3, 2, 24)
    cos, sin = angles(3, 16)
    found = ops.rope(x, cos, sin, interleaved=True)
    assert torch.equal(found[..., 16:], x[..., 16:])
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))


@DTYPES
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
def test_gated(dtype, name, function):
    gate, up = random(4, 16).to(dtype), random(4, 16, seed=1).to(dtype)
    assert torch.equal(reference.gated(gate, up, name), function(gate) * up)
    # Other kernels have another exponential.
    last_place = torch.finfo(dtype).eps
    found = ops.gated(gate, up, name)
    torch.testing.assert_close(found, function(gate) * up, rtol=8 * last_place, atol=1e-7)


def test_an_unknown_activation_is_an_error():
    with pytest.raises(ConfigError, match="'selu' is unknown; HMT has silu, gelu, gelu_tanh"):
        ops.gated(torch.ones(1, 1), torch.ones(1, 1), "selu")


@DTYPES
@pytest.mark.parametrize("sizes", [(1, 4, 64, 128), (3, 2, 37, 9), (16, 3, 16, 70), (20, 2, 8, 8)])
def test_products_of_heads_equal_sums_in_double_precision(dtype, sizes):
    tokens, heads, inputs, outputs = sizes
    # Strides of a part of what is wider, as latent attention hands over.
    x = random(tokens, heads, inputs + 3).to(dtype)[..., :inputs]
    whole = random(heads, inputs + 5, outputs, seed=1).to(dtype)
    turned = random(heads, outputs + 2, inputs, seed=2).to(dtype)
    for matrices in (whole[:, 5:], turned[:, :outputs].transpose(1, 2)):
        found = fused_ops.head_products(x, matrices)
        wanted = torch.einsum("thi,hio->tho", x.double(), matrices.double())
        assert found.shape == wanted.shape and found.dtype == dtype
        most = torch.einsum("thi,hio->tho", x.double().abs(), matrices.double().abs())
        least = torch.finfo(dtype).eps * wanted.abs() + 2e-6 * most
        assert bool(((found.double() - wanted).abs() <= least).all())
