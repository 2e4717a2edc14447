"""Blocks of ggml's types: products with int8 equal the reference to the bit on every machine."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from encoded import random_weight

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding, WeightTensor
from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension
from hmt.kernels.reference.gguf_blocks import block_integers
from hmt.kernels.reference.packing import unpack_blocks

NATIVE = extension.load()
INT8, FLOAT = Activations.INT8_BLOCK, Activations.FLOAT
TOKENS = (1, 2, 5, 17, 32, 41, 64)  # of one to four tiles, even and odd
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SHAPES))
SOME = pytest.mark.parametrize("kind", [Encoding.Q4_K, Encoding.Q6_K, Encoding.Q5_1, Encoding.Q8_0])


@pytest.fixture(params=NATIVE.isas() if NATIVE is not None else ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if NATIVE is None:
        pytest.skip("the extension was not built, or HMT_KERNELS=reference")
    before = NATIVE.isa()
    NATIVE.set_isa(request.param)
    yield request.param
    NATIVE.set_isa(before)


def columns_of(kind: Encoding, blocks: int = 3) -> int:
    """More than are unpacked at a time for few tokens, and no multiple of 256 where they may be."""
    return 256 * blocks + (96 if BLOCK_SHAPES[kind].numbers == 32 else 0)


def activations(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Whose blocks have scales far apart, and one of which is zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=random)
    x *= 10 ** torch.randint(-2, 3, (tokens, 1), generator=random)
    x[:, ::97] *= 30
    x[-1, :256] = 0
    return x


EXPECTED: dict[Encoding, tuple[WeightTensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}


def case(kind: Encoding) -> tuple[WeightTensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, x, bias, and the reference's result, which no other token changes."""
    if kind not in EXPECTED:
        w = random_weight(kind, 85, columns_of(kind), activations=INT8, seed=len(EXPECTED))
        x, bias = activations(max(TOKENS), w.shape[1]), torch.linspace(-3, 3, w.shape[0])
        EXPECTED[kind] = w, x, bias, reference.linear(x, w, bias)
    return EXPECTED[kind]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@KINDS
def test_products_with_int8_equal_the_reference_to_the_bit(kind: Encoding, isa: str) -> None:
    w, x, bias, expected = case(kind)
    for tokens in TOKENS:
        same(ops.linear(x[:tokens], w, bias), expected[:tokens])
    same(ops.linear(x[-1:], w, bias), expected[-1:])


@pytest.mark.parametrize("kind", [k for k, shape in BLOCK_SHAPES.items() if shape.numbers == 32])
def test_products_with_a_scale_per_block_equal_the_reference_to_the_bit(
    kind: Encoding, isa: str
) -> None:
    w, x, bias, _ = case(kind)
    w = replace(w, activations=Activations.INT8_GROUP)
    expected = reference.linear(x, w, bias)
    for tokens in TOKENS:
        same(ops.linear(x[:tokens], w, bias), expected[:tokens])
    codes, scales = reference.quantize_activation_blocks(x, 32)
    rounded = codes.double() * scales.double().repeat_interleave(32, 1)
    numbers = reference.dequantize(w, torch.float32).double()
    size = rounded.abs() @ numbers.abs().T + 1
    assert ((expected - rounded @ numbers.T - bias).abs() <= 1e-6 * size).all()


@KINDS
def test_the_reference_is_the_sum_of_its_integers(kind: Encoding) -> None:
    """In float64, from codes, scales and minima; f32 sums are near it."""
    w, x, bias, expected = case(kind)
    shape, blocks = BLOCK_SHAPES[kind], w.shape[1] // BLOCK_SHAPES[kind].numbers
    parts = block_integers(kind, unpack_blocks(w, slice(0, w.shape[0])))
    codes = parts.codes.double().view(len(parts.codes), -1, shape.group)
    numbers = codes * parts.scales[..., None] * parts.d[..., None]
    if parts.minima is not None and parts.e is not None:
        numbers += (parts.minima * parts.e.double())[..., None]
    numbers = numbers.reshape(w.shape[0], blocks * shape.numbers)
    rounded, scales = reference.quantize_activation_blocks(x)
    product = rounded.double() * scales.double().repeat_interleave(256, 1)[:, : w.shape[1]]
    exact = product @ numbers.T + bias
    size = product.abs() @ numbers.abs().T + 1
    assert ((expected - exact).abs() <= 1e-6 * size).all()


LOOKED_UP = pytest.mark.parametrize(
    "kind", [k for k in BLOCK_SHAPES if k.name.startswith(("IQ1", "IQ2", "IQ3"))]
)


@LOOKED_UP
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_entry_of_a_grid_is_multiplied(kind: Encoding, isa: str, tokens: int) -> None:
    """Each of up to 2048 occurs in 32,768 random ones, beside signs and scales of all kinds."""
    w = random_weight(kind, 512, 512, activations=INT8)
    x = activations(tokens + 1, w.shape[1])[:tokens]
    same(ops.linear(x, w), reference.linear(x, w))


@KINDS
@pytest.mark.parametrize("tokens", [513, 1041])
def test_a_few_tokens_more_than_are_multiplied_at_a_time(
    kind: Encoding, isa: str, tokens: int
) -> None:
    """512 at most: all are arranged together, and multiplied in two or three pieces."""
    w = random_weight(kind, 19, 512, activations=INT8)
    x = activations(tokens + 1, w.shape[1])[:tokens]
    some = [0, 255, 256, 271, 272, 511, 512, tokens - 2, tokens - 1]
    same(ops.linear(x, w)[some], reference.linear(x[some], w))


@SOME
def test_products_do_not_depend_on_threads_nor_on_the_length_of_x(kind: Encoding, isa: str) -> None:
    """Over more columns than are unpacked at a time for many tokens."""
    w = random_weight(kind, 21, columns_of(kind, 17), activations=INT8)
    x = activations(19, w.shape[1]).bfloat16()
    expected = reference.linear(x, w)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            same(ops.linear(x, w), expected)
            same(ops.linear(x[3:4], w), expected[3:4])
    finally:
        torch.set_num_threads(before)


@KINDS
def test_the_largest_codes_do_not_overflow(kind: Encoding, isa: str) -> None:
    """All bits set or none: codes, scales and minima at the ends of their ranges."""
    w = random_weight(kind, 32, 256, activations=INT8)
    for byte in (0, 0x7F, 0x80, 0xFF):
        w.data.fill_(byte)
        if w.scales is not None:
            w.scales.fill_(1.0)
        x = torch.ones(33, 256)
        x[1::2] = -1
        x[2, ::2] = -1
        expected = reference.linear(x, w)
        finite = expected.isfinite()  # an f16 of all ones is none
        for tokens in (1, 9, 33):
            found = ops.linear(x[:tokens], w)
            assert torch.equal(found.isfinite(), finite[:tokens])
            assert torch.equal(found[finite[:tokens]], expected[:tokens][finite[:tokens]])


@pytest.mark.parametrize("kind", [Encoding.Q3_K, Encoding.Q6_K, Encoding.IQ4_XS])
def test_every_code_times_every_scale(kind: Encoding, isa: str) -> None:
    """Signed scales and codes, which meet in a byte or two: the least of both among them."""
    w = random_weight(kind, 512, 512, activations=INT8, seed=3)
    parts = block_integers(kind, unpack_blocks(w, slice(0, w.shape[0])))
    codes = parts.codes.view(len(parts.codes), -1, BLOCK_SHAPES[kind].group)
    products = codes * parts.scales[..., None]
    assert products.max() == codes.min() * parts.scales.min()
    x = activations(33, w.shape[1])
    same(ops.linear(x, w), reference.linear(x, w))


@KINDS
def test_numbers_and_products_with_floats(kind: Encoding, isa: str) -> None:
    w, x, bias, _ = case(kind)
    w = WeightTensor(kind, w.shape, w.data, w.scales, activations=FLOAT)
    for rows in (slice(None), slice(7, 8), slice(30, 51)):
        same(ops.dequantize(w, torch.float32, rows), reference.dequantize(w, torch.float32, rows))
        same(ops.dequantize(w, torch.bfloat16, rows), reference.dequantize(w, torch.bfloat16, rows))
    numbers = reference.dequantize(w, torch.float64)
    for tokens in (1, 5, 17):
        exact = x[:tokens].double() @ numbers.T + bias
        size = x[:tokens].double().abs() @ numbers.abs().T + 1
        found = ops.linear(x[:tokens], w, bias)
        assert ((found - exact).abs() <= 2e-6 * size).all()
        same(found[:1], ops.linear(x[:1], w, bias))


def test_weights_of_other_packings_share_a_call(isa: str) -> None:
    """Tokens have one scale for some of them, and one per 256 columns for others."""
    kinds = {
        "q": (Encoding.Q4_K, INT8),
        "k": (Encoding.INT4_GROUP, Activations.INT8_TOKEN),
        "v": (Encoding.Q6_K, INT8),
        "o": (Encoding.Q4_K, FLOAT),
    }
    params: Mapping[str, WeightTensor] = {
        name: random_weight(kind, 32, 512, activations=form) for name, (kind, form) in kinds.items()
    }
    for tokens in (1, 6, 40):
        x = activations(tokens, 512)
        found = ops.linear_many(x, params, ("q", "k", "v", "o"))
        for index, name in enumerate("qkv"):
            same(found[:, 32 * index : 32 * index + 32], reference.linear(x, params[name]))
        same(found[:, 96:], ops.linear(x, params["o"]))
