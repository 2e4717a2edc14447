"""Linear layers on the GPU, against float64 and against the reference."""

import math

import pytest
import torch
from triton_weights import EPSILON, FLOATS, assert_is_product, numbers, random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.triton.gemm import dispatch as kernels
from hmt.kernels.triton.gemm import skinny_launch

PANELS = [
    (Encoding.INT4_GROUP, {"group": 32}),
    (Encoding.INT4_GROUP, {"group": 16, "scale_dtype": torch.float16}),
    (Encoding.INT4_GROUP, {"group": 64, "scale_dtype": torch.float32}),
    (Encoding.INT4_GROUP, {"group": 192}),
    (Encoding.INT4_GROUP, {"group": 32, "offsets": "zeros"}),
    (Encoding.INT4_GROUP, {"group": 16, "offsets": "minima"}),
    (Encoding.INT4_GROUP, {"group": 64, "offsets": "minima"}),
    (Encoding.NVFP4, {}),
    (Encoding.MXFP4, {}),
]
ROWS = [
    (Encoding.INT8_CHANNEL, {}),
    (Encoding.INT8_GROUP, {"group": 32}),
    (Encoding.INT8_GROUP, {"group": 64}),
    (Encoding.INT8_GROUP, {"group": 48}),
    (Encoding.INT8_GROUP, {"group": 16, "offsets": "minima"}),
    (Encoding.FP8_BLOCK, {}),
    (Encoding.FP8_BLOCK, {"tile": (32, 48)}),
]
ENCODED = pytest.mark.parametrize(
    ("encoding", "options"), PANELS + ROWS, ids=lambda value: str(value).replace(" ", "")
)


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """The interpreter multiplies bf16 wrongly, and cuts numbers off that it makes bf16."""
    return [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]


def random_x(tokens: int, columns: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(device)


@ENCODED
@pytest.mark.parametrize("tokens", [1, 19])
def test_few_tokens(device, encoding, options, tokens):
    w = random_weight(encoding, 70, 192, device=device, **options)
    bias = random_x(1, 70, device, seed=2)[0]
    for dtype in dtypes_of(device):
        x = random_x(tokens, 192, device).to(dtype)
        assert_is_product(kernels.linear(x, w, bias), x, w, bias)


@ENCODED
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_int8_tokens(device, encoding, options, tokens):
    if encoding is Encoding.FP8_BLOCK:
        pytest.skip("not multiplied as integers")
    w = random_weight(
        encoding, 45, 192, device=device, activations=Activations.INT8_TOKEN, **options
    )
    bias = random_x(1, 45, device, seed=2)[0]
    for dtype in (*dtypes_of(device), *([torch.float32] if tokens == 1 else [])):
        x = random_x(tokens, 192, device).to(dtype)
        assert_is_product(kernels.linear(x, w, bias), x, w, bias)


@ENCODED
def test_many_tokens(device, encoding, options):
    w = random_weight(encoding, 40, 192, device=device, **options)
    for dtype in (*dtypes_of(device), torch.float32):
        x = random_x(70, 192, device).to(dtype)
        assert_is_product(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("encoding", list(FLOATS))
def test_weights_without_scales(device, encoding):
    w = random_weight(encoding, 40, 96, device=device)
    bias = random_x(1, 40, device, seed=2)[0]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = random_x(5, 96, device).to(dtype)
        assert_is_product(kernels.linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.INT4_GROUP, Encoding.INT8_GROUP])
def test_more_inputs_than_one_step_takes(device, encoding, activations):
    for columns in (1024, 1056):
        w = random_weight(encoding, 33, columns, device=device, activations=activations)
        for tokens in (1, 17):
            x = random_x(tokens, columns, device).half()
            assert_is_product(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("activations", list(Activations))
def test_rows_that_begin_at_any_byte(device, activations):
    for columns in (71, 74, 260):
        w = random_weight(
            Encoding.INT8_CHANNEL, 19, columns, device=device, activations=activations
        )
        for dtype in dtypes_of(device):
            x = random_x(3, columns, device).to(dtype)
            assert_is_product(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("names", [("q", "k"), ("q", "k", "v"), ("q", "k", "v", "other", "plain")])
@pytest.mark.parametrize("activations", list(Activations))
def test_many_weights_side_by_side(device, names, activations):
    params: dict[str, WeightTensor] = {
        name: random_weight(
            Encoding.NVFP4, rows, 128, device=device, activations=activations, seed=rows
        )
        for name, rows in (("q", 70), ("k", 16), ("v", 37))
    }
    params["other"] = random_weight(
        Encoding.INT4_GROUP, 20, 128, device=device, activations=activations
    )
    params["plain"] = random_weight(Encoding.F16, 9, 128, device=device)
    bias = random_x(1, 16, device, seed=3)[0].half()
    params["k_bias"] = WeightTensor(Encoding.F16, (16,), bias)
    for tokens in (1, 70):
        x = random_x(tokens, 128, device).half()
        found = kernels.linear_many(x, params, names)
        column = 0
        for name in names:
            w = params[name]
            part = found[:, column : column + w.shape[0]]
            assert_is_product(part, x, w, bias if name == "k" else None)
            column += w.shape[0]
        assert column == found.shape[1]


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("encoding", [Encoding.INT4_GROUP, Encoding.INT8_CHANNEL, Encoding.F16])
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_into_columns_of_a_larger_tensor(device, encoding, activations, tokens):
    activations = Activations.FLOAT if encoding is Encoding.F16 else activations
    w = random_weight(encoding, 33, 64, device=device, activations=activations)
    x = random_x(tokens, 96, device).half()[:, 16:80]
    larger = torch.full((tokens, 60), math.nan, dtype=torch.float16, device=device)
    kernels.linear_into(larger[:, 11:44], x, w)
    assert_is_product(larger[:, 11:44], x, w)
    assert larger[:, :11].isnan().all() and larger[:, 44:].isnan().all()


@ENCODED
def test_dequantized_numbers_are_those_of_the_reference(device, encoding, options):
    w = random_weight(encoding, 70, 192, device=device, **options)
    for dtype in (torch.float32, *dtypes_of(device)):
        for rows in (None, slice(13, 67), slice(16, 17)):
            found = kernels.dequantize(w, dtype, rows)
            expected = reference.dequantize(w, dtype, rows)
            if w.minima is None:
                assert torch.equal(found, expected)
            else:
                # One rounding fewer, where the minimum is added to the product as it is made.
                exact = numbers(w)[rows or slice(None)]
                size = EPSILON[dtype] * exact.abs() + 2**-22 * 16 * 0.2
                assert ((found.double() - expected.double()).abs() <= size).all()


def test_dequantize_of_floats_copies_nothing(device):
    w = random_weight(Encoding.BF16, 4, 8, device=device)
    rows = kernels.dequantize(w, torch.bfloat16, slice(1, 3))
    assert rows.data_ptr() == w.data[1].data_ptr()


@pytest.mark.parametrize("columns", [1, 5, 300, 20000])
def test_quantized_activations_are_those_of_the_reference(device, columns):
    x = random_x(3, columns, device) * torch.tensor([[1e-30], [1.0], [1e30]], device=device)
    x[1, 0] = 127 * x[1].abs().max()  # a step of one: ties
    for dtype in (torch.float32, torch.bfloat16):
        rounded = x.to(dtype)
        codes, scales = kernels.quantize_activations(rounded)
        # On the CPU: CUDA multiplies by 1 / 127 where the reference divides.
        expected_codes, expected_scales = reference.quantize_activations(rounded.cpu())
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(codes.cpu(), expected_codes)


def test_quantized_activations_round_ties_to_even_and_keep_zeros(device):
    rows = [[127.0, 0.5, 1.5, 2.5, -0.5, -3.5], [0.0] * 6, [1.0, -1.0, 0, 0, 0, 0]]
    codes, scales = kernels.quantize_activations(torch.tensor(rows, device=device).bfloat16())
    assert codes.tolist() == [[127, 0, 2, 2, 0, -4], [0] * 6, [127, -127, 0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0, pytest.approx(1 / 127)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_spreads_to_its_token_only(device, bad, activations):
    w = random_weight(Encoding.INT4_GROUP, 16, 64, device=device, activations=activations)
    for tokens in (2, 9, 70):
        x = torch.ones(tokens, 64, dtype=torch.float16, device=device)
        x[0, 3] = bad
        out = kernels.linear(x, w)
        assert not out[0].isfinite().any() and out[1:].isfinite().all()


@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.INT4_GROUP, Encoding.INT8_CHANNEL])
@pytest.mark.parametrize("activations", list(Activations))
def test_no_tokens(device, encoding, activations):
    w = random_weight(encoding, 5, 64, device=device, activations=activations)
    assert kernels.linear(torch.empty(0, 64, device=device).half(), w).shape == (0, 5)


@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.MXFP4, Encoding.INT4_GROUP])
def test_very_small_and_very_large_activations(device, encoding, size):
    if device.type != "cuda":
        pytest.skip("bf16, which the interpreter cannot multiply")
    w = random_weight(encoding, 40, 128, device=device, spread=False)
    for tokens in (1, 6, 20):
        x = (random_x(tokens, 128, device) * size).bfloat16()
        assert_is_product(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.INT4_GROUP, Encoding.INT8_CHANNEL])
@pytest.mark.parametrize("activations", list(Activations))
def test_calls_can_be_captured(device, encoding, activations):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    w = random_weight(encoding, 64, 128, device=device, activations=activations)
    for tokens in (1, 4, 40, 200):
        x = random_x(tokens, 128, device).bfloat16()
        kernels.linear(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.linear(x, w)
        x.copy_(random_x(tokens, 128, device, seed=9))
        out.fill_(math.nan)
        graph.replay()
        assert_is_product(out, x, w)


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        (Encoding.INT4_GROUP, {"group": 32}),
        (Encoding.INT4_GROUP, {"group": 16, "offsets": "minima"}),
        (Encoding.INT4_GROUP, {"group": 128}),
        (Encoding.INT4_GROUP, {"group": 96, "offsets": "zeros"}),
        (Encoding.NVFP4, {}),
        (Encoding.INT8_GROUP, {"group": 64}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_block_sizes_of_weights_with_many_rows(device, monkeypatch, encoding, options, activations):
    monkeypatch.setattr(skinny_launch, "_MANY_ROWS", 1)
    w = random_weight(encoding, 90, 384, device=device, activations=activations, **options)
    for tokens in (1, 12):
        x = random_x(tokens, 384, device).half()
        assert_is_product(kernels.linear(x, w), x, w)


@pytest.mark.parametrize("limit", ["_MANY_ROWS", "_SOME_ROWS", "_MANY_INPUTS"])
@pytest.mark.parametrize("encoding", [Encoding.NVFP4, Encoding.INT4_GROUP])
def test_block_sizes_of_all_shapes(device, monkeypatch, encoding, limit):
    monkeypatch.setattr(skinny_launch, limit, 1)
    w = random_weight(encoding, 70, 320, device=device)
    on_card = device.type == "cuda"
    for tokens in (1, 2, 3, 6, 12, 30) if on_card else (1, 3, 6):
        for dtype in dtypes_of(device):
            x = random_x(tokens, 320, device).to(dtype)
            assert_is_product(kernels.linear(x, w), x, w)
