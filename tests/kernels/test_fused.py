"""Norms, rotations and gated activations of the extension, on every instruction set."""

import math

import pytest
import torch
from instruction_sets import without_tiles
from torch.nn import functional

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension

native = extension.load()
pytestmark = pytest.mark.skipif(
    native is None, reason="the extension was not built, or HMT_KERNELS=reference"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 15, 16, 17, 64, 100, 128, 333, 2048]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@pytest.fixture(params=without_tiles(native) if native else [], autouse=True)
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture
def on_threads():
    before, pool = torch.get_num_threads(), native.threads()

    def both(compute):
        results = []
        for threads in (1, 2):
            native.set_threads(threads)
            torch.set_num_threads(threads)
            results.append(compute())
        return results

    yield both
    native.set_threads(pool)
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, expected, dtype, units=1.0):
    """Within so many units in the last place of `expected`; NaN and infinities at equal places."""
    assert found.dtype == dtype and found.shape == expected.shape
    found, expected = found.double(), expected.double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    number = expected.isfinite()
    apart = (found[number] - expected[number]).abs()
    exponent = torch.frexp(expected[number]).exponent - 1
    unit = torch.ldexp(torch.full_like(apart, ULP[dtype]), exponent).clamp(min=SMALLEST[dtype])
    assert (apart <= units * unit).all(), (apart / unit).max()


def adversarial(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that norms get wrong: zeros, huge, denormal, one large among small, NaN, infinity."""
    rows = random(9, width, seed=width)
    rows[1] = 0
    rows[2] *= 1e30
    rows[3] *= 1e-41
    rows[4] *= 1e-6
    rows[4, width // 2] = 6e4
    rows[5, -1] = math.nan
    rows[6, 0] = math.inf
    rows[7] *= 1e18
    rows[8] = 1e-3
    return rows.to(dtype)


def assert_normed(found, x, weight, eps, offset, dtype):
    expected = reference.rms_norm(x, weight, eps, offset=offset)
    # f32: the sum's order, the root and two products.  Others: what is rounded to the neighbour
    # before the weight is applied may be up to two units away after it.
    assert_close(found, expected, dtype, units=5 if dtype is torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(dtype, weight_dtype, offset):
    for width in WIDTHS:
        x = adversarial(width, dtype)
        weight = random(width, seed=1, dtype=weight_dtype)
        before = x.clone()
        found = ops.rms_norm(x, weight, 1e-6, offset=offset)
        assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
        assert_normed(found, x, weight, 1e-6, offset, dtype)
        for row in range(len(x)):  # alone, so that a neighbour cannot have helped
            assert_same(ops.rms_norm(x[row : row + 1], weight, 1e-6, offset=offset)[0], found[row])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rounds_seldom_differently(dtype):
    x, weight = random(64, 2048, dtype=dtype) * 3, random(2048, seed=1, dtype=dtype)
    found, expected = ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    else:
        assert (found != expected).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_adding_before_the_norm(dtype, offset):
    for width in WIDTHS:
        residual, x = adversarial(width, dtype), random(9, width, seed=2, dtype=dtype)
        weight = random(width, seed=1, dtype=dtype)
        added = residual + x
        found = ops.add_rms_norm(residual, x, weight, 1e-6, offset=offset)
        assert_same(residual, added)
        assert_normed(found, added, weight, 1e-6, offset, dtype)
        assert_same(found, ops.rms_norm(added, weight, 1e-6, offset=offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_with_codes(dtype, offset):
    for width in WIDTHS:
        residual = adversarial(width, dtype)[[0, 1, 2, 3, 4, 8]]
        residual[2] = residual[2].clamp(-2e4, 2e4)  # of infinities no codes are defined
        x, weight = random(6, width, seed=2, dtype=dtype), random(width, seed=1, dtype=dtype)
        alone = ops.rms_norm_quantize(x, weight, 1e-6, offset=offset)
        added = residual + x
        together = ops.add_rms_norm_quantize(residual, x, weight, 1e-6, offset=offset)
        assert_same(residual, added)
        for source, (normed, codes, scales, sums) in ((x, alone), (added, together)):
            assert_same(normed, ops.rms_norm(source, weight, 1e-6, offset=offset))
            expected, expected_scales = reference.quantize_activations(normed)
            assert codes.shape == (6, -(-width // 64) * 64) and codes.dtype == torch.int8
            assert torch.equal(codes[:, :width], expected) and not codes[:, width:].any()
            assert torch.equal(scales, expected_scales)
            assert torch.equal(sums, codes.unflatten(1, (-1, 16)).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_inside_a_larger_tensor(dtype):
    for heads, dim in ((1, 64), (4, 128), (3, 17), (2, 1)):
        both = random(5, (heads + 2) * dim, dtype=dtype)
        before = both.clone()
        weight = random(dim, seed=1, dtype=dtype)
        view = both[:, dim : (heads + 1) * dim].unflatten(1, (heads, dim))
        expected = ops.rms_norm(view.contiguous(), weight, 1e-6)
        assert_same(ops.rms_norm(view, weight, 1e-6), expected)
        ops.rms_norm_inplace(view, weight, 1e-6)
        assert_same(view.contiguous(), expected)
        assert torch.equal(both[:, :dim], before[:, :dim])
        assert torch.equal(both[:, (heads + 1) * dim :], before[:, (heads + 1) * dim :])
        assert_normed(expected, before[:, dim:-dim].unflatten(1, (heads, dim)), weight, 1e-6, 0,
                      dtype)  # fmt: skip


def angles(tokens: int, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(tokens)[:, None] * 10 ** -torch.linspace(0, 3, rot // 2)
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rot"),
    [(128, 128), (64, 64), (64, 32), (96, 24), (20, 8), (2, 2), (50, 34), (512, 512)],
)
def test_rotations_equal_torch_to_the_bit(dtype, interleaved, dim, rot):
    q, k = random(6, 5, dim, dtype=dtype), random(6, 2, dim, seed=1, dtype=dtype)
    q[0, 0, 0], q[1, 1, 1], q[2, 2] = 3e4, 1e-7, 0
    if dtype is not torch.float16:
        q[3, 3], k[3] = q[3, 3] * 1e-38, k[3] * 1e37
    cos, sin = angles(6, rot)
    expected = [reference.rope(x, cos, sin, interleaved=interleaved) for x in (q, k)]
    for x, other in zip((q, k), expected, strict=True):
        assert_same(ops.rope(x, cos, sin, interleaved=interleaved), other)
        assert_same(ops.rope(x[2:3], cos[2:3], sin[2:3], interleaved=interleaved), other[2:3])
    # In place, in a tensor that holds more, as projections to q, k and v in one do.
    qkv = torch.cat((q.flatten(1), k.flatten(1), k.flatten(1)), dim=1)
    q_part, k_part, v_part = qkv.split((5 * dim, 2 * dim, 2 * dim), dim=1)
    ops.rope_inplace(
        q_part.unflatten(1, (5, dim)), k_part.unflatten(1, (2, dim)), cos, sin,
        interleaved=interleaved,
    )  # fmt: skip
    assert_same(q_part.unflatten(1, (5, dim)), expected[0])
    assert_same(k_part.unflatten(1, (2, dim)), expected[1])
    assert torch.equal(v_part.unflatten(1, (2, dim)), k)
    # Out of a tensor whose heads lie apart, as DeepSeek's do.
    apart = random(6, 5, dim + 24, dtype=dtype)
    part = apart[..., 24:]
    wanted = reference.rope(part, cos, sin, interleaved=interleaved)
    assert_same(ops.rope(part, cos, sin, interleaved=interleaved), wanted)


def test_rotation_of_numbers_that_are_none():
    x = random(2, 1, 32)
    x[0, 0, 3], x[1, 0, 20] = math.nan, math.inf
    cos, sin = angles(2, 32)
    assert_same(ops.rope(x, cos, sin), reference.rope(x, cos, sin))


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    """In float64, without the cancellation of the usual formulas."""
    x = x.double()
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "relu":
        return x.clamp(min=0)
    if name == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(name, dtype):
    """Of every bf16 number, or of many f32 ones: alone (times one), against float64."""
    if dtype is torch.float32:
        x = torch.cat((torch.linspace(-100, 100, 20001), random(2000), random(2000) * 1e-6))
    else:
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[None]
    found = ops.gated(x, torch.ones_like(x), name)
    expected = exact(name, x)
    if dtype is torch.float32:
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-11)
        visible = expected.abs() > 1e-36
        torch.testing.assert_close(found.double()[visible], expected[visible], rtol=2e-5, atol=0)
    else:
        # Smaller results are zero where e^-x overflows, as torch's are.
        number = (x.double().abs() < 1e30) & ((expected == 0) | (expected.abs() > 1e-36))
        assert_close(found[number], expected[number].to(dtype), dtype)
    alone = ops.gated(x.flatten()[:, None], torch.ones_like(x).flatten()[:, None], name)
    assert_same(alone.flatten(), found.flatten())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_extremes_equal_torch(name, dtype):
    x = torch.tensor([[0.0, -0.0, math.nan, -math.inf, 3e4, -3e4, 6e4, -6e4, 1e30, -1e30]]).to(
        dtype
    )
    if dtype is torch.float16:
        x = x[:, :8]
    assert_same(
        ops.gated(x, torch.ones_like(x), name), reference.gated(x, torch.ones_like(x), name)
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(name, dtype):
    for tokens, width in ((1, 1), (3, 17), (5, 64), (2, 333), (1, 5632)):
        pair = random(tokens, 2 * width, dtype=dtype) * 4
        gate, up = pair.chunk(2, dim=1)
        function = {
            "silu": functional.silu,
            "gelu": functional.gelu,
            "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
            "relu": functional.relu,
        }[name]
        found, expected = ops.gated_pair(pair, name), function(gate) * up
        # torch's formulas of gelu lose digits where the result is small against x.
        unit = ULP[dtype] * expected.double().abs() * (8 if dtype is torch.float32 else 2)
        lost = 5e-7 * (gate.double() * up.double()).abs() + SMALLEST[dtype]
        assert ((found.double() - expected.double()).abs() <= unit + lost).all()
        assert_same(ops.gated(gate, up, name), found)
        assert_same(ops.gated(gate.contiguous(), up.contiguous(), name), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_of_gpt_oss(dtype):
    """Gates are at most 7, what goes through them lies in -7 to 7, and has one added."""
    extremes = torch.tensor([[0.0, math.nan, 7.0, 9.0, 3e4, -3e4, -80.0, 1.0, 1.0, 1.0]])
    others = torch.tensor([[1.0, 1.0, 8.0, -9.0, math.inf, 1.0, 1.0, math.nan, -1.0, -3e4]])
    gate = torch.cat((extremes, random(40, 10) * 8)).to(dtype)
    up = torch.cat((others, random(40, 10, seed=1) * 8)).to(dtype)
    y = gate.double().clamp(max=7)
    wanted = (y * torch.sigmoid(1.702 * y)).to(dtype) * (up.double().clamp(-7, 7) + 1).to(dtype)
    for found in (ops.gated(gate, up, "clamped_swish"), reference.gated(gate, up, "clamped_swish")):
        torch.testing.assert_close(found, wanted, rtol=4 * ULP[dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_of_deepseek_v4(dtype):
    """Gates are at most 10, and what goes through them lies in -10 to 10."""
    extremes = torch.tensor([[0.0, math.nan, 10.0, 12.0, 3e4, -3e4, -80.0, 1.0, 1.0, 1.0]])
    others = torch.tensor([[1.0, 1.0, 11.0, -12.0, math.inf, 1.0, 1.0, math.nan, -1.0, -3e4]])
    gate = torch.cat((extremes, random(40, 10) * 12)).to(dtype)
    up = torch.cat((others, random(40, 10, seed=1) * 12)).to(dtype)
    wanted = functional.silu(gate.double().clamp(max=10)).to(dtype)
    wanted = wanted * up.double().clamp(-10, 10).to(dtype)
    for found in (ops.gated(gate, up, "clamped_silu"), reference.gated(gate, up, "clamped_silu")):
        torch.testing.assert_close(found, wanted, rtol=4 * ULP[dtype], atol=1e-6, equal_nan=True)


def test_results_do_not_depend_on_the_number_of_threads(on_threads):
    x, weight = random(150, 1024, dtype=torch.bfloat16), random(1024, seed=1)
    cos, sin = angles(150, 64)

    def compute():
        residual = x.clone()
        return (
            ops.rms_norm(x, weight, 1e-6),
            ops.add_rms_norm(residual, x, weight, 1e-6),
            *ops.rms_norm_quantize(x, weight, 1e-6),
            ops.rope(x.unflatten(1, (16, 64)), cos, sin),
            ops.gated_pair(x, "silu"),
        )

    for one, two in zip(*on_threads(compute), strict=True):
        assert torch.equal(one, two)


def test_every_instruction_set_norms_alike(isa):
    x, weight = random(3, 1000, dtype=torch.float32), random(1000, seed=1)
    found = ops.rms_norm(x, weight, 1e-6)
    native.set_isa("portable")
    assert torch.equal(found, ops.rms_norm(x, weight, 1e-6))


def test_what_the_extension_does_not_take_is_left_to_the_reference():
    x, weight = random(4, 32).double(), random(32).double()
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert torch.equal(ops.gated(x, x, "silu"), reference.gated(x, x, "silu"))
    wide = random(32, 8).T
    assert not wide.is_contiguous()
    assert torch.equal(ops.rms_norm(wide, weight, 1e-6), reference.rms_norm(wide, weight, 1e-6))
    assert torch.equal(ops.gated(wide, wide, "gelu"), reference.gated(wide, wide, "gelu"))
    deep = random(2, 3, 4, 32)
    assert torch.equal(ops.rms_norm(deep, weight, 1e-6), reference.rms_norm(deep, weight, 1e-6))
    for tokens in (0,):
        none = random(tokens, 32)
        assert ops.rms_norm(none, weight.float(), 1e-6).shape == (0, 32)
        assert ops.gated_pair(none, "silu").shape == (0, 16)
        cos, sin = angles(tokens, 8)
        assert ops.rope(none.unflatten(1, (4, 8)), cos, sin).shape == (0, 4, 8)
