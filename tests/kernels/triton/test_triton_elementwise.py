"""Norms, rotary embedding and activations of Triton against the reference."""

import pytest
import torch

from hmt.base.errors import ConfigError
from hmt.kernels import reference

elementwise = pytest.importorskip("hmt.kernels.triton.elementwise.rope_gate")

# The interpreter computes with numpy, which warns where a GPU makes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The interpreter rounds to bfloat16 by cutting off.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# The reference adds squares in another order and may round to the other neighbour.
STEPS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(seed, *shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def near(found, wanted):
    step = STEPS[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=step, atol=step * 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 64), (3, 200), (2, 5, 33), (0, 16), (7,), (1, 4100)])
def test_rms_norm(device, dtype, offset, shape):
    x = random(1, *shape, dtype=dtype, device=device) * 3
    weight = random(2, shape[-1], device=device)
    found = elementwise.rms_norm(x, weight, 1e-6, offset=offset)
    assert found.dtype is dtype and found.shape == x.shape
    near(found, reference.rms_norm(x, weight, 1e-6, offset=offset))


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_rms_norm_of_extreme_numbers(device, size):
    x = random(3, 4, 96, device=device) * size
    x[2] = 0
    weight = random(4, 96, device=device)
    near(
        elementwise.rms_norm(x, weight, 1e-6),
        reference.rms_norm(x, weight, 1e-6),
    )
    x[1, 5] = float("nan")
    found = elementwise.rms_norm(x, weight, 1e-6)
    assert found[1].isnan().all() and not found[[0, 2, 3]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_rows_within_larger_tensors(device, dtype):
    whole = random(5, 6, 9, 48, dtype=dtype, device=device)
    weight = random(6, 48, device=device).to(dtype)
    before = whole.clone()
    heads = whole[:, 2:7]
    wanted = reference.rms_norm(heads, weight, 1e-5)
    near(elementwise.rms_norm(heads, weight, 1e-5), wanted)
    elementwise.rms_norm_inplace(heads, weight, 1e-5)
    near(whole[:, 2:7], wanted)
    assert torch.equal(whole[:, :2], before[:, :2]) and torch.equal(whole[:, 7:], before[:, 7:])
    columns = before[:, 0].contiguous()[:, 8:40]
    wanted = reference.rms_norm(columns, weight[:32], 1e-5)
    near(elementwise.rms_norm(columns, weight[:32], 1e-5), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(device, dtype):
    x, residual = (random(s, 5, 80, dtype=dtype, device=device) for s in (7, 8))
    weight, other = random(9, 80, device=device), residual.clone()
    wanted = reference.add_rms_norm(other, x, weight, 1e-6)
    found = elementwise.add_rms_norm(residual, x, weight, 1e-6)
    assert torch.equal(residual, other)
    near(found, wanted)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("width", [64, 33, 200])
def test_norm_with_codes(device, add, width):
    x, residual = (random(s, 4, width, dtype=torch.float16, device=device) for s in (10, 11))
    x[2], residual[2] = 0, 0
    weight = random(12, width, device=device)
    if add:
        other = residual.clone()
        wanted = reference.add_rms_norm_quantize(other, x, weight, 1e-6)
        found = elementwise.add_rms_norm_quantize(residual, x, weight, 1e-6)
        assert torch.equal(residual, other)
    else:
        wanted = reference.rms_norm_quantize(x, weight, 1e-6)
        found = elementwise.rms_norm_quantize(x, weight, 1e-6)
    near(found[0], wanted[0])
    codes, scales, sums = found[1:]
    # Codes are exactly those of the norm that was returned (on a GPU torch divides otherwise).
    again, again_scales = (t.to(device) for t in reference.quantize_activations(found[0].cpu()))
    assert torch.equal(codes[:, :width], again) and not codes[:, width:].any()
    assert codes.shape == wanted[1].shape and torch.equal(scales, again_scales)
    assert torch.equal(sums, codes.unflatten(1, (-1, 16)).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "dim", "rot"), [(3, 64, 64), (1, 48, 24), (5, 6, 6), (0, 8, 8)])
def test_rope(device, dtype, interleaved, tokens, dim, rot):
    whole = random(13, tokens, 7, dim, dtype=dtype, device=device)
    angles = random(14, tokens, rot // 2, device=device) * 100
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    x = whole[:, 1:6]
    wanted = reference.rope(x, cos, sin, interleaved=interleaved)
    found = elementwise.rope(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    before = whole.clone()
    q, k = whole[:, :5], whole[:, 5:6]
    elementwise.rope_inplace(q, k, cos, sin, interleaved=interleaved)
    wanted = reference.rope(before[:, :6], cos, sin, interleaved=interleaved)
    torch.testing.assert_close(whole[:, :6], wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(whole[:, 6:], before[:, 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated(device, dtype, activation):
    for shape in [(3, 100), (1, 1), (0, 8), (2, 3, 20)]:
        gate, up = (random(s, *shape, dtype=dtype, device=device) * 4 for s in (15, 16))
        if gate.numel() > 10:
            gate.view(-1)[:5] = torch.tensor([0, -0.0, 60, -60, 1e-8], device=device)
        wanted = reference.gated(gate, up, activation)
        found = elementwise.gated(gate, up, activation)
        assert found.dtype is dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=STEPS[dtype], atol=1e-5)
    pair = random(17, 4, 90, dtype=dtype, device=device)[:, :80]
    wanted = reference.gated_pair(pair, activation)
    found = elementwise.gated_pair(pair, activation)
    torch.testing.assert_close(found, wanted, rtol=STEPS[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gated(device, dtype):
    for rows, width, gates in [(3, 100, 100), (1, 300, 1), (5, 7, 1), (0, 8, 8), (66, 40, 40)]:
        x = random(21, rows, 2 * width, dtype=dtype, device=device)[:, :width] * 4
        gate = random(22, rows, 2 * gates, dtype=dtype, device=device)[:, ::2] * 4
        if gates > 10 and rows:
            gate[0, :5] = torch.tensor([0, -0.0, 90, -90, 1e-8], device=device)
        wanted = reference.sigmoid_gated(x, gate)
        found = elementwise.sigmoid_gated(x, gate)
        assert found.dtype is dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=STEPS[dtype], atol=1e-5)


def test_an_unknown_activation_is_refused(device):
    x = torch.ones(1, 2, device=device)
    with pytest.raises(ConfigError, match="selu"):
        elementwise.gated(x, x, "selu")
