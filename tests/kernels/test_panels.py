"""Products with 4-bit weights in panels of 16 rows, on every instruction set.

The oracle packs panels itself, by the layout in csrc/linear/weight.h, and works out int8 products
in the order that csrc/linear/linear.h defines, so that they must be equal to the bit.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hmt.kernels.cpu import extension

native = extension.load()
pytestmark = pytest.mark.skipif(
    native is None, reason="the extension was not built, or HMT_KERNELS=reference"
)
ISAS = native.isas() if native is not None else []
INT4, FP4 = 5, 6  # Code in csrc/linear/weight.h
PANELS = 1  # Packing
SCALES = {"f32": 1, "bf16": 2, "f16": 3, "e4m3": 4, "e8m0": 5}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
DOUBLED = np.array([int(2 * v) for v in E2M1] + [-int(2 * v) for v in E2M1], dtype=np.int64)
SIZES = [(1, 40), (2, 16), (3, 33), (5, 1), (17, 48), (64, 7), (333, 31)]  # tokens, rows
KINDS = ["int4", "zeros", "minima", "fp4"]


@pytest.fixture(params=ISAS)
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def panel_of(rows: np.ndarray) -> np.ndarray:
    """[rows, n] as [panels, n, 16], with zeros for rows that do not exist."""
    padded = np.zeros((-(-rows.shape[0] // 16) * 16, rows.shape[1]), dtype=rows.dtype)
    padded[: rows.shape[0]] = rows
    return np.ascontiguousarray(padded.reshape(-1, 16, rows.shape[1]).transpose(0, 2, 1))


def packed(nibbles: np.ndarray) -> np.ndarray:
    """[rows, columns] of 0..15 as uint8 [panels, columns / 32, 4, 16, 4]."""
    panels = panel_of(nibbles).transpose(0, 2, 1)  # [panels, 16, columns]
    low_high = panels.reshape(panels.shape[0], 16, -1, 2, 4, 4)  # row, block, half, quad, column
    pairs = low_high[:, :, :, 0] | low_high[:, :, :, 1] << 4
    return np.ascontiguousarray(pairs.transpose(0, 2, 3, 1, 4).astype(np.uint8))


def read_scales(stored: np.ndarray, kind: str) -> np.ndarray:
    """What stored scales are as f32."""
    if kind == "e4m3":
        return torch.from_numpy(stored).view(torch.float8_e4m3fn).float().numpy()
    if kind == "e8m0":
        return np.ldexp(np.float32(1), stored.astype(np.int64) - 127).astype(np.float32)
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def random_scales(random, shape, kind: str, spread: float) -> np.ndarray:
    """Stored scales whose magnitudes differ by 10^(+-spread), some of them 0 or negative."""
    if kind == "e4m3":
        codes = random.integers(0, 256, shape, dtype=np.uint8)
        return np.where(codes & 127 == 127, 0, codes).astype(np.uint8)  # no NaN
    if kind == "e8m0":
        exponents = random.integers(-int(3 * spread), int(3 * spread) + 1, shape)
        return np.clip(127 + exponents, 0, 254).astype(np.uint8)
    values = random.normal(size=shape) * 10.0 ** random.uniform(-spread, spread, shape)
    values = np.where(random.random(shape) < 0.05, 0, values).astype(np.float32)
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if kind == "f16" else values


@dataclass
class Panels:
    """A weight, its memory, and what the oracle needs of it."""

    rows: int
    columns: int
    group: int
    factor: np.float32
    codes: np.ndarray  # int64 [rows, columns], those of e2m1 doubled
    scales: np.ndarray  # f32 [rows, groups] of these codes
    minima: np.ndarray | None  # f32 [rows, groups]
    memory: tuple
    arguments: tuple

    def native(self, int8: bool, scale_columns: int = 0):
        return native.make_weight(*self.arguments, int8, scale_columns, 0)

    def numbers(self) -> np.ndarray:
        """f32, each product and sum rounded."""
        values = self.codes.astype(np.float32) * self.scales.repeat(self.group, 1)
        return values if self.minima is None else values + self.minima.repeat(self.group, 1)


def random_panels(
    kind: str, rows: int, columns: int, group: int, scales: str, seed: int = 0, spread: float = 1.0
) -> Panels:
    random = np.random.default_rng(seed)
    nibbles = random.integers(0, 16, (rows, columns), dtype=np.uint8)
    nibbles[:, :group] = random.choice([0, 8, 15], (rows, 1)).astype(np.uint8)
    groups = columns // group
    stored = random_scales(random, (rows, groups), scales, spread)
    factor = np.float32(random.choice([1.0, 0.37, -2.5]))
    codes = nibbles.astype(np.int64)
    zeros = minima = None
    if kind == "fp4":
        codes = DOUBLED[nibbles]
    elif kind == "zeros":
        zeros = random.integers(0, 17, (rows, groups), dtype=np.uint8)
        codes = codes - zeros.repeat(group, 1)
    elif kind == "minima":
        minima = random_scales(random, (rows, groups), scales, spread)
    else:
        codes = codes - 8
    memory = tuple(
        None if array is None else np.ascontiguousarray(array)
        for array in (
            packed(nibbles),
            panel_of(stored),
            None if zeros is None else panel_of(zeros),
            None if minima is None else panel_of(minima),
        )
    )
    at = [0 if array is None else array.ctypes.data for array in memory]
    code_factor = np.float32(factor * np.float32(0.5)) if kind == "fp4" else factor
    return Panels(
        rows,
        columns,
        group,
        factor,
        codes,
        read_scales(stored, scales) * code_factor,
        None if minima is None else read_scales(minima, scales),
        memory,
        (
            FP4 if kind == "fp4" else INT4,
            PANELS,
            rows,
            columns,
            at[0],
            SCALES[scales],
            at[1],
            1,
            group,
            at[2],
            at[3],
            float(factor),
        ),
    )


def linear(
    w: Panels, x: torch.Tensor, int8: bool, threads: int = 1, scale_columns: int = 0
) -> torch.Tensor:
    out = torch.full((x.shape[0], w.rows), float("nan"))
    native.linear(
        (w.native(int8, scale_columns),),
        x.data_ptr(),
        TYPES[x.dtype],
        *x.shape,
        x.stride(0),
        out.data_ptr(),
        0,
        w.rows,
        threads,
    )
    return out


def rounded(x: torch.Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens as int8 codes, and scales [tokens, columns / width]."""
    values = x.float().numpy().reshape(len(x), -1, width)
    scales = np.abs(values).max(2) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    codes = np.clip(values / divisors[..., None], -127, 127)
    return np.rint(codes).astype(np.int64).reshape(x.shape), scales


def integer_product(w: Panels, x: torch.Tensor, scale_columns: int = 0) -> np.ndarray:
    """The product of int8 activations, to the bit; scales are of tokens, or of groups in them."""
    codes, scales = rounded(x, scale_columns or w.columns)
    token_scales = np.ones(len(x), np.float32) if scale_columns else scales[:, 0]
    total = np.zeros((x.shape[0], w.rows), dtype=np.float32)
    for group in range(w.columns // w.group):
        span = slice(group * w.group, (group + 1) * w.group)
        dots = (codes[:, span].astype(np.float64) @ w.codes[:, span].T.astype(np.float64)).astype(
            np.float32
        )
        sums = codes[:, span].sum(1).astype(np.float32)
        products = w.scales[None, :, group]
        if scale_columns:
            products = products * scales[:, group, None]
            sums = sums * scales[:, group]
        total = total + dots * products
        if w.minima is not None:
            total = total + sums[:, None] * w.minima[:, group]
    return total * token_scales[:, None]


CASES = [
    (kind, group, scales)
    for number, kind in enumerate(KINDS)
    for place, group in enumerate((16, 32, 64, 128))
    for scales in (list(SCALES)[(number + place) % 5], list(SCALES)[(number + place + 2) % 5])
]


def some_columns(group: int, tokens: int) -> int:
    """More groups than kernels read scales of at a time, but few where there are many tokens."""
    columns = group * (tokens % 7 + 18) if tokens < 64 else 2 * max(group, 32)
    return columns + columns % 32


@functools.cache
def integer_case(kind: str, group: int, scales: str, tokens: int, rows: int):
    """A weight, tokens, and their product; the same for every instruction set."""
    columns = some_columns(group, tokens)
    w = random_panels(kind, rows, columns, group, scales, seed=tokens)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    x[0, : columns // 2] = 0
    x[-1] *= 1e3
    x = x.to(list(TYPES)[tokens % 3])
    return w, x, torch.from_numpy(integer_product(w, x))


@functools.cache
def float_case(kind: str, group: int, scales: str, tokens: int, rows: int):
    """A weight, tokens, their product in float64, and how far from it f32 sums may be."""
    columns = some_columns(group, tokens)
    w = random_panels(kind, rows, columns, group, scales, seed=tokens)
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=random).to(list(TYPES)[tokens % 3])
    exact = x.double() @ torch.from_numpy(w.numbers()).double().T
    # Rounding is relative to what is summed; zero points and minima are summed apart.
    terms = np.abs(w.scales).repeat(group, 1) * 16.0
    if w.minima is not None:
        terms = terms + np.abs(w.minima).repeat(group, 1)
    size = x.double().abs() @ torch.from_numpy(terms).double().T
    return w, x, exact, 1e-6 * size + 1e-30


@pytest.mark.parametrize(("kind", "group", "scales"), CASES)
def test_int8_products_equal_the_definition_to_the_bit(isa, kind, group, scales):
    for tokens, rows in SIZES:
        w, x, expected = integer_case(kind, group, scales, tokens, rows)
        assert torch.equal(linear(w, x, int8=True, threads=1 + tokens % 2), expected)


@pytest.mark.parametrize(("kind", "scales"), [(kind, s) for kind, g, s in CASES if g == 32])
def test_products_with_a_scale_per_group_equal_the_definition_to_the_bit(isa, kind, scales):
    for tokens, rows in SIZES:
        w, x, _ = integer_case(kind, 32, scales, tokens, rows)
        expected = torch.from_numpy(integer_product(w, x, 32))
        assert torch.equal(linear(w, x, True, 1 + tokens % 2, scale_columns=32), expected)


@pytest.mark.parametrize(("kind", "group", "scales"), CASES)
def test_float_products_are_close_to_float64(isa, kind, group, scales):
    for tokens, rows in SIZES:
        w, x, exact, tolerance = float_case(kind, group, scales, tokens, rows)
        found = linear(w, x, int8=False, threads=1 + tokens % 2)
        assert bool(((found - exact).abs() <= tolerance).all())


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_other_tokens_or_threads(isa, kind, int8):
    w = random_panels(kind, 100, 256, 32, "bf16")
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = linear(w, x, int8, threads=2)
    assert torch.equal(together, linear(w, x, int8, threads=1))
    if int8:
        apart = torch.cat([linear(w, token[None], int8) for token in x])
        assert torch.equal(together, apart)


@pytest.mark.parametrize("spread", [30.0, 3.0])
def test_extreme_scales(isa, spread):
    for kind in KINDS:
        w = random_panels(kind, 21, 640, 32, "f32", spread=spread)
        x = torch.randn(9, 640, generator=torch.Generator().manual_seed(2))
        assert torch.equal(linear(w, x, int8=True), torch.from_numpy(integer_product(w, x)))
    w = random_panels("fp4", 21, 640, 32, "e8m0", spread=spread)
    assert torch.equal(linear(w, x, int8=True), torch.from_numpy(integer_product(w, x)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_codes_do_not_overflow(isa, kind):
    for group in (16, 32, 128):
        for sign in (-1.0, 1.0):
            w = random_panels(kind, 16, 8192, group, "f32")
            w.memory[0].fill(0x77 if kind == "fp4" else 0xFF)
            w.codes[:] = 12 if kind == "fp4" else 15
            if kind == "int4":
                w.codes[:] = 7
            if kind == "zeros":
                w.memory[2].fill(255)
                w.codes[:] = 15 - 255
            x = torch.full((9, 8192), sign)
            assert torch.equal(linear(w, x, int8=True), torch.from_numpy(integer_product(w, x)))


def test_tokens_of_zeros_and_groups_of_zeros_give_zeros(isa):
    for kind in KINDS:
        w = random_panels(kind, 18, 128, 64, "bf16")
        assert torch.equal(linear(w, torch.zeros(3, 128), int8=True), torch.zeros(3, 18))
        assert torch.equal(linear(w, torch.zeros(3, 128), int8=False), torch.zeros(3, 18))
        w.memory[1].fill(0)
        if w.minima is not None:
            w.memory[3].fill(0)
        assert torch.equal(linear(w, torch.ones(3, 128), int8=True), torch.zeros(3, 18))


@pytest.mark.parametrize(("kind", "group", "scales"), CASES)
def test_numbers_equal_the_definition_to_the_bit(isa, kind, group, scales):
    w = random_panels(kind, 53, max(group, 32) * 5, group, scales)
    for first, count in ((0, 53), (17, 30), (52, 1)):
        out = torch.full((count, w.columns), float("nan"))
        native.dequantize(w.native(False), first, count, out.data_ptr(), 0, 2)
        assert torch.equal(out, torch.from_numpy(w.numbers()[first : first + count]))


def test_several_weights_share_activations_but_not_their_forms(isa):
    """Weights with one x, whose kernels want group sums of different kinds of it."""
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights = [
        (random_panels(kind, 20, 256, group, "bf16", seed=i), int8)
        for i, (kind, group, int8) in enumerate(
            (k, g, i) for k in KINDS for g in (32, 128) for i in (True, False)
        )
    ]
    out = torch.full((19, 20 * len(weights)), float("nan"))
    natives = tuple(w.native(int8) for w, int8 in weights)
    native.linear(natives, x.data_ptr(), 1, 19, 256, 256, out.data_ptr(), 0, out.shape[1], 2)
    for i, (w, int8) in enumerate(weights):
        assert torch.equal(out[:, 20 * i : 20 * (i + 1)], linear(w, x, int8))


def msd(w: Panels, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.full((x.shape[0], w.rows), float("nan"))
    native.msd_linear(
        w.native(True),
        x.data_ptr(),
        TYPES[x.dtype],
        x.shape[0],
        x.stride(0),
        out.data_ptr(),
        0,
        w.rows,
        threads,
    )
    return out


def test_halves_of_activations_give_every_product_of_two_numbers(isa):
    """All int8 activations (but -128, which rounding does not give) times all weights."""
    w = random_panels("int4", 16, 32, 32, "f32")
    nibbles = np.zeros((16, 32), dtype=np.uint8) + 8
    nibbles[:, 0] = np.arange(16)
    w.memory[0][:] = packed(nibbles)
    x = torch.zeros(255, 32)
    x[:, 0] = torch.arange(-127, 128)
    x[:, 1] = 127  # makes the scale 1; its weight is 0
    products = x[:, :1] * torch.arange(-8, 8)
    expected = products * torch.from_numpy(w.scales[:, 0])
    assert torch.equal(msd(w, x), expected)
    assert torch.equal(linear(w, x, int8=True), expected)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_halves_of_activations_give_the_product_to_the_bit(isa, group):
    for tokens, rows in SIZES:
        w, x, expected = integer_case("int4", group, "bf16", tokens, rows)
        assert torch.equal(msd(w, x, threads=1 + tokens % 2), expected)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.full(x.shape, 77, dtype=torch.int8), torch.empty(x.shape[0])
    native.quantize_tokens(
        x.data_ptr(), TYPES[x.dtype], *x.shape, x.stride(0), codes.data_ptr(), scales.data_ptr(), 2
    )
    return codes, scales


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 64, 100, 4096])
def test_tokens_are_rounded_as_defined(isa, columns):
    random = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=random)
    x[1] = 0
    x[2] *= 1e30
    x[3] *= 1e-30
    x[4] = torch.randint(-127, 128, (columns,), generator=random) + 0.5  # ties, where 127 occurs
    x[4, 0] = 127
    for dtype in TYPES:
        given = x.to(dtype)[[0, 1, 4, 5]] if dtype is torch.float16 else x.to(dtype)
        codes, scales = quantized(given)
        expected, expected_scales = rounded(given, columns)
        assert np.array_equal(codes.numpy(), expected)
        assert np.array_equal(scales.numpy(), expected_scales[:, 0])


def test_numbers_that_are_none_end_up_in_the_scale(isa):
    for number in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for place in (0, 20, 35):
            x = torch.ones(2, 36)
            x[0, place] = number
            codes, scales = quantized(x)
            assert not scales[0].isfinite()
            assert scales[0].isnan() == (number != number)
            assert scales[1] == torch.tensor(1.0) / 127
            assert bool((codes[1] == 127).all())
