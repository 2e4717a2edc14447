"""Row-major weights in the compiled kernels: every code, instruction set and shape."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hmt.kernels.cpu import extension

native = extension.load()
pytestmark = pytest.mark.skipif(
    native is None, reason="the extension was not built, or HMT_KERNELS=reference"
)
# Numbers of the enums in csrc/linear/weight.h and csrc/base/dtype.h.
CODES = {"f32": 0, "bf16": 1, "f16": 2, "fp8": 3, "int8": 4}
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROWS, NO_SCALES, F32_SCALES = 0, 0, 1
TOKENS, MANY = (1, 2, 3, 5, 17, 64), 333
ISAS = native.isas() if native is not None else []
# rows, columns, rows of a tile, columns of a tile
SHAPES = (
    (40, 320, 1, 320),
    (33, 100, 1, 100),
    (17, 129, 16, 48),
    (5, 33, 1, 32),
    (67, 600, 3, 50),
    (16, 2048, 1, 64),
)
SHORT_GROUPS = ((33, 416, 1, 16), (21, 384, 1, 16), (22, 320, 1, 32))


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@dataclass
class Rows:
    """A weight whose data end where their allocation ends, at an odd address where they may."""

    code: str
    data: Tensor  # [rows, columns]
    scales: Tensor | None = None  # [ceil(rows / tile[0]), ceil(columns / tile[1])]
    tile: tuple[int, int] = (1, 1)
    factor: float = 1.0
    minima: Tensor | None = None  # as the scales

    def __post_init__(self) -> None:
        width = self.data.element_size()
        memory = torch.empty(self.data.numel() * width + width, dtype=torch.uint8)
        packed = memory[width:].view(-1)
        packed.copy_(self.data.contiguous().view(torch.uint8).view(-1))
        self.memory, self.address = memory, packed.data_ptr()

    def native(self, *, int8_activations: bool = False):
        scales = self.scales
        return native.make_weight(
            CODES[self.code],
            ROWS,
            *self.data.shape,
            self.address,
            NO_SCALES if scales is None else F32_SCALES,
            0 if scales is None else scales.data_ptr(),
            *self.tile,
            0,
            0 if self.minima is None else self.minima.data_ptr(),
            self.factor,
            int8_activations,
            0,
            0,
        )

    def spread_scales(self) -> Tensor:
        rows, columns = self.data.shape
        if self.scales is None:
            return torch.full((rows, columns), self.factor)
        high = (self.scales * self.factor).repeat_interleave(self.tile[0], 0)[:rows]
        return high.repeat_interleave(self.tile[1], 1)[:, :columns]

    def spread_minima(self) -> Tensor:
        if self.minima is None:
            return torch.zeros(1)
        return self.minima.repeat_interleave(self.tile[1], 1)[:, : self.data.shape[1]]

    def numbers(self) -> Tensor:
        return self.data.double() * self.spread_scales().double() + self.spread_minima().double()


def random_rows(code: str, shape: tuple[int, int, int, int], seed: int = 0) -> Rows:
    rows, columns, tile_rows, tile_columns = shape
    random = torch.Generator().manual_seed(seed)
    if code in FLOATS:
        return Rows(code, torch.randn(rows, columns, generator=random).to(FLOATS[code]))
    codes = torch.randint(0, 256, (rows, columns), generator=random, dtype=torch.uint8)
    sizes = (-(-rows // tile_rows), -(-columns // tile_columns))
    scales = torch.rand(sizes, generator=random) - 0.3
    scales *= 10.0 ** torch.randint(-3, 3, sizes, generator=random)
    if code == "int8":
        data = codes.view(torch.int8)
    else:
        codes[codes & 127 == 127] = 0
        data = codes.view(torch.float8_e4m3fn)
    return Rows(code, data, scales, (tile_rows, tile_columns))


def with_minima(shape: tuple[int, int, int, int], seed: int = 0) -> Rows:
    """int8 groups, of which each has a minimum in the size of what is added to it."""
    rows, columns, _, width = shape
    w = random_rows("int8", (rows, columns, 1, width), seed)
    assert w.scales is not None
    random = torch.Generator().manual_seed(seed)
    w.minima = w.scales.roll(1, 0) * torch.randint(-128, 64, w.scales.shape, generator=random)
    return w


def activations(tokens: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=random).to(dtype)


def multiply(
    w: Rows, x: Tensor, dtype: torch.dtype = torch.float32, *, int8_activations: bool = False
) -> Tensor:
    out = torch.full((len(x), len(w.data)), torch.nan, dtype=dtype)
    native.linear(
        (w.native(int8_activations=int8_activations),),
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        x.shape[1],
        out.data_ptr(),
        DTYPES[dtype],
        len(w.data),
        2,
    )
    return out


def expect_close(found: Tensor, x: Tensor, w: Rows) -> None:
    """Within a few rounding errors of the sum of the products' magnitudes."""
    numbers, x = w.numbers(), x.double()
    # Minima are summed apart.
    sizes = (numbers - w.spread_minima()).abs() + w.spread_minima().abs()
    expected, size = x @ numbers.T, x.abs() @ sizes.T
    assert ((found.double() - expected).abs() <= 3e-6 * size + 1e-37).all()


def by_definition(x: Tensor, w: Rows) -> Tensor:
    """int8 weights times int8 activations as csrc/linear/linear.h defines it, to the bit."""
    scales = x.float().abs().amax(1) / 127
    codes = x.float().div(torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp(-127, 127)
    spread, width = w.spread_scales(), w.tile[1]
    total = torch.zeros(len(x), len(w.data))
    for begin in range(0, w.data.shape[1], width):
        part = slice(begin, begin + width)
        dots = codes[:, part].double() @ w.data[:, part].double().T
        total += dots.float() * spread[:, begin]
        if w.minima is not None:
            total += codes[:, part].double().sum(1).float()[:, None] * w.minima[:, begin // width]
    return total * scales[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("code", CODES)
def test_products_are_close_to_float64(code, dtype):
    for i, shape in enumerate(SHAPES):
        w = random_rows(code, shape, seed=i)
        for tokens in TOKENS[i % 2 :: 2] + (MANY,) * (i < 3):
            x = activations(tokens, shape[1], dtype)
            expect_close(multiply(w, x), x, w)


def test_integer_products_are_equal_to_the_bit():
    for i, shape in enumerate(SHAPES + SHORT_GROUPS):
        w = random_rows("int8", shape, seed=i)
        for tokens in TOKENS[i % 2 :: 2] + (MANY,) * (i in (0, 2, 7)):
            x = activations(tokens, shape[1], torch.bfloat16)
            assert torch.equal(multiply(w, x, int8_activations=True), by_definition(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_minima(dtype):
    """Those of groups, and of whole rows; with floats and with codes."""
    for i, shape in enumerate(SHAPES + SHORT_GROUPS):
        w = with_minima(shape, seed=i)
        for tokens in TOKENS[i % 2 :: 2] + (MANY,) * (i in (1, 2, 7)):
            x = activations(tokens, shape[1], dtype)
            expect_close(multiply(w, x), x, w)
            assert torch.equal(multiply(w, x, int8_activations=True), by_definition(x, w))


@pytest.mark.parametrize("tokens", [1, 4, 12, 20])
def test_a_token_s_result_does_not_depend_on_the_others(tokens):
    w = random_rows("int8", (67, 600, 1, 50))
    x = activations(tokens, 600, torch.float32)
    together = multiply(w, x, int8_activations=True)
    alone = torch.cat([multiply(w, t[None], int8_activations=True) for t in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("code", CODES)
def test_a_token_s_result_does_not_depend_on_how_many_there_are(code, dtype):
    # Columns in one pass and in several, scales that end within one, rows that fill no tile.
    for shape in ((33, 1100, 1, 1100), (35, 1408, 16, 128), (17, 129, 16, 48)):
        w = random_rows(code, shape)
        x = torch.randn(103, shape[1]).to(dtype)
        whole = multiply(w, x)
        for tokens in (1, 2, 3, 4, 5, 7, 12, 16, 17, 33):
            assert torch.equal(multiply(w, x[:tokens]), whole[:tokens]), tokens
        alone = [multiply(w, row[None]) for row in x[90:]]
        assert torch.equal(torch.cat(alone), whole[90:])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_largest_codes_and_the_longest_rows_do_not_overflow(tokens, sign):
    columns = 132104
    w = Rows("int8", torch.full((2, columns), -128, dtype=torch.int8), torch.ones(2, 1))
    w.tile = (1, columns)
    x = torch.full((tokens, columns), sign)
    assert torch.equal(multiply(w, x, int8_activations=True), by_definition(x, w))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("tokens", [2, 20])
def test_extreme_sizes_and_zeros(code, tokens):
    w = random_rows(code, (20, 96, 1, 96))
    if w.scales is not None:
        w.scales[:6] *= torch.tensor([[1e30], [1e-30], [0.0], [1e-20], [1e20], [-1.0]])
    w = Rows(code, w.data.float().index_fill(0, torch.tensor([7]), 0).to(w.data.dtype), w.scales)
    w.tile = (1, 96)
    x = activations(tokens, 96, torch.float32)
    x[0] *= 1e-8
    x[1] = 0
    found = multiply(w, x)
    expect_close(found, x, w)
    assert (found[1] == 0).all() and (found[:, 7] == 0).all()
    if code == "int8":
        assert torch.equal(multiply(w, x, int8_activations=True), by_definition(x, w))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("tokens", [3, 18])
def test_infinite_weights_stay_in_their_row(code, tokens):
    if code not in FLOATS:
        w = random_rows(code, (18, 37, 1, 20))
        w.scales[4] = torch.inf
    else:
        w = random_rows(code, (18, 37, 1, 37))
        w.data[4] = torch.inf
        w = Rows(code, w.data)
    found = multiply(w, activations(tokens, 37, torch.bfloat16))
    others = torch.arange(18) != 4
    assert found[:, others].isfinite().all() and not found[:, 4].isfinite().any()


@pytest.mark.parametrize("tokens", [1, 2, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flush", [False, True])
def test_every_fp8_code_counts_as_what_it_is(tokens, dtype, flush):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127]
    w = Rows("fp8", torch.diag(codes).view(torch.float8_e4m3fn), torch.full((1, 1), 0.5))
    w.tile = (254, 254)
    torch.set_flush_denormal(flush)
    found = multiply(w, torch.ones(tokens, 254, dtype=dtype))
    torch.set_flush_denormal(False)
    assert torch.equal(found, codes.view(torch.float8_e4m3fn).float().mul(0.5).expand(tokens, -1))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("flush", [False, True])
def test_decoded_numbers_equal_torch_to_the_bit(code, flush):
    for shape in SHAPES:
        w = random_rows(code, shape)
        w.factor = 0.75 if w.scales is not None else 1.0
        rows, columns = shape[:2]
        out = torch.empty(rows - 3, columns)
        torch.set_flush_denormal(flush)
        native.dequantize(w.native(), 3, rows - 3, out.data_ptr(), DTYPES[out.dtype], 2)
        torch.set_flush_denormal(False)
        assert torch.equal(out, (w.data.float() * w.spread_scales())[3:])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_results_in_other_types_are_rounded_once(dtype):
    w = random_rows("bf16", (50, 70, 1, 70))
    x = activations(19, 70, torch.bfloat16)
    assert torch.equal(multiply(w, x, dtype), multiply(w, x).to(dtype))
