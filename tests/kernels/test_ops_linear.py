"""Linear layers of `ops` (compiled where the extension is there) and of the reference."""

import math

import pytest
import torch
from encoded import FLOATS, numbers, random_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import SANITIZED

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding
from hmt.kernels import ops, reference

BACKENDS = pytest.mark.parametrize(
    "backend", [ops] if SANITIZED else [ops, reference], ids=lambda b: b.__name__.rpartition(".")[2]
)
ENCODINGS = pytest.mark.parametrize("encoding", list(Encoding))
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@BACKENDS
@ENCODINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_linear_is_the_product_of_the_numbers(backend, encoding, dtype, tokens):
    w = random_weight(encoding, 70, 256)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 256, generator=random).to(dtype)
    bias = torch.randn(70, generator=random)
    found = backend.linear(x, w, bias)
    expected = x.double() @ numbers(w).T + bias
    # Weights, sums and result may each be rounded to the dtype.
    magnitude = x.double().abs() @ numbers(w).abs().T + bias.abs()
    assert found.dtype == dtype
    assert ((found - expected).abs() <= (2 * EPSILON[dtype] + 256 * 2**-24) * magnitude).all()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_the_dtype_of_x_gives_what_torch_gives(backend, dtype):
    encoding = next(e for e, own in FLOATS.items() if own == dtype)
    w = random_weight(encoding, 48, 64)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(48).to(dtype)
    found = backend.linear(x, w, bias)
    expected = torch.nn.functional.linear(x, w.data, bias)
    torch.testing.assert_close(found, expected, rtol=EPSILON[dtype], atol=64 * EPSILON[dtype])


@BACKENDS
@ENCODINGS
@pytest.mark.parametrize("columns", [96, 192])
def test_dequantize_rounds_once(backend, encoding, columns):
    columns *= BLOCK_SHAPES[encoding].numbers // 32 if encoding in BLOCK_SHAPES else 1
    w = random_weight(encoding, 70, columns, group=32)
    exact = numbers(w)
    assert torch.equal(backend.dequantize(w, torch.float32), exact.float())
    assert torch.equal(backend.dequantize(w, torch.bfloat16), exact.float().bfloat16())
    rows = backend.dequantize(w, torch.float32, slice(13, 67))
    assert torch.equal(rows, exact[13:67].float())


def test_dequantize_of_floats_copies_nothing():
    w = random_weight(Encoding.BF16, 4, 8)
    assert ops.dequantize(w, torch.bfloat16, slice(1, 3)).data_ptr() == w.data[1].data_ptr()


def test_a_large_weight_is_converted_in_chunks_with_the_same_result(monkeypatch):
    w = random_weight(Encoding.FP8_BLOCK, 200, 96)
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(3))
    whole = reference.linear(x, w)
    monkeypatch.setattr("hmt.kernels.reference.matmul._CHUNK_BYTES", 64 * 96 * 4)
    torch.testing.assert_close(reference.linear(x, w), whole)


@BACKENDS
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5)
    )
)
@settings(max_examples=60, deadline=None)
def test_quantized_activations_are_half_a_step_from_x(backend, rows):
    x = torch.tensor(rows, dtype=torch.float32).view(-1, 5)
    codes, scales = backend.quantize_activations(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert codes.abs().amax().item() <= 127 if rows else True
    # x in steps, up to 127, is rounded twice in f32 before it is rounded to a code, each time by up
    # to 2^-24 of it: 2^-16 of a step.  A denormal scale is itself rounded, by up to 2^-150.
    step = scales.double()[:, None] / 2
    bound = step * (1 + 2**-15) + 128 * 2.0**-150
    assert ((codes.double() * scales.double()[:, None] - x.double()).abs() <= bound).all()


@BACKENDS
def test_quantized_activations_round_ties_to_even_and_keep_zeros(backend):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5], [0.0] * 6, [1.0, -1.0, 0, 0, 0, 0]])
    codes, scales = backend.quantize_activations(x.bfloat16())
    assert codes.tolist() == [[127, 0, 2, 2, 0, -4], [0] * 6, [127, -127, 0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0, pytest.approx(1 / 127)]


@BACKENDS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_spreads_to_its_token_only(backend, bad):
    w = random_weight(Encoding.INT4_GROUP, 8, 64, activations=Activations.INT8_TOKEN)
    x = torch.ones(2, 64)
    x[0, 3] = bad
    out = backend.linear(x, w)
    assert not out[0].isfinite().any() and out[1].isfinite().all()


@BACKENDS
@pytest.mark.parametrize(
    ("encoding", "group"),
    [
        (Encoding.INT8_CHANNEL, 0),
        (Encoding.NVFP4, 16),
        (Encoding.MXFP4, 32),
        *((e, g) for e in (Encoding.INT8_GROUP, Encoding.INT4_GROUP) for g in (32, 64, 128)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_products_are_exact(backend, encoding, group, dtype):
    w = random_weight(encoding, 33, 640, group=group, activations=Activations.INT8_TOKEN)
    random = torch.Generator().manual_seed(4)
    x = torch.randn(3, 640, generator=random).to(dtype)
    bias = torch.randn(33, generator=random)
    codes, scales = backend.quantize_activations(x)
    rounded = codes.double() * scales.double()[:, None]
    expected = rounded @ numbers(w).T + bias
    # Only the sum over up to 20 groups, the two scales and the bias round, in f32.
    magnitude = rounded.abs() @ numbers(w).abs().T + bias.abs()
    found = backend.linear(x, w, bias)
    assert found.dtype == dtype
    assert ((found - expected).abs() <= EPSILON[dtype] * expected.abs() + 2**-20 * magnitude).all()


@BACKENDS
@pytest.mark.parametrize("encoding", [Encoding.INT4_GROUP, Encoding.MXFP4, Encoding.Q5_0])
def test_a_large_activation_rounds_its_group_of_inputs_only(backend, encoding):
    """A scale per 32 inputs: what the largest one of a token leaves of the others."""
    w = random_weight(encoding, 33, 640, activations=Activations.INT8_GROUP)
    x = torch.randn(3, 640, generator=torch.Generator().manual_seed(4))
    x[:, 70] = 5000.0
    groups = x.view(3, 20, 32).double()
    scales = (groups.abs().amax(-1, keepdim=True).float() / 127).double()
    rounded = ((groups / scales).round() * scales).view(3, 640)
    found = backend.linear(x, w)
    magnitude = rounded.abs() @ numbers(w).abs().T
    assert ((found - rounded @ numbers(w).T).abs() <= 2**-20 * magnitude).all()


@BACKENDS
@pytest.mark.parametrize("activations", [Activations.INT8_TOKEN, Activations.INT8_GROUP])
def test_a_token_does_not_depend_on_the_others(backend, activations):
    w = random_weight(Encoding.INT4_GROUP, 40, 256, activations=activations)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(5))
    alone = torch.cat([backend.linear(token[None], w) for token in x])
    assert torch.equal(backend.linear(x, w), alone)


@BACKENDS
@pytest.mark.parametrize(
    ("encoding", "activations"),
    [
        *((e, Activations.FLOAT) for e in (Encoding.BF16, Encoding.INT8_CHANNEL, Encoding.Q8_0)),
        *((e, Activations.INT8_TOKEN) for e in (Encoding.INT8_CHANNEL, Encoding.INT4_GROUP)),
        (Encoding.INT4_GROUP, Activations.FLOAT),
        (Encoding.Q8_0, Activations.INT8_BLOCK),
    ],
)
def test_no_tokens(backend, encoding, activations):
    w = random_weight(encoding, 5, 64, activations=activations)
    assert backend.linear(torch.empty(0, 64), w).shape == (0, 5)
