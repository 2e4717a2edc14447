"""Results of the kernels for several tokens: which tile is whose, and how sums are written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hmt.kernels.triton import device_math
from hmt.kernels.triton.gluon_compat import along

_activated = gluon.jit(device_math.activated.fn)


@gluon.jit
def place(tile, rows_0, rows_1, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Which tile of its weight a program takes, where its results begin, and which it is."""
    column, which = 0, 0
    if COUNT > 1:
        tiles = gl.cdiv(rows_0, ROWS)
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
    if COUNT > 2:
        tiles = gl.cdiv(rows_1, ROWS)
        if (which == 1) & (tile >= tiles):
            tile, column, which = tile - tiles, rows_0 + rows_1, 2
    return tile, column, which


@gluon.jit
def rows_of(WARPS: gl.constexpr, MMA: gl.constexpr):
    """Rows of a tile in the order of sums: two of 64, warp, two of 8, one of 8; [32 WARPS, 1]."""
    m = along(32 * WARPS, 0, MMA)
    return m // 16 % WARPS * 32 + m % 8 * 4 + m // (16 * WARPS) * 2 + m // 8 % 2


@gluon.jit
def write_sums(
    out, total, bias, order, tile, rows, column, all_rows, first_token, tokens, out_stride,
    WARPS: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr, ADD: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Write sums [32 WARPS, TOKENS], of `rows_of` a tile; order: where tokens go, or None."""
    row = tile * (32 * WARPS) + rows_of(WARPS, MMA)
    token = first_token + along(TOKENS, 1, MMA)
    mask = (row < rows) & (token < tokens)
    if SPLIT > 1:
        at = (gl.program_id(1) * tokens + token).to(gl.int64) * all_rows
        gl.store(out + at + (column + row), total, mask=mask)
    else:
        kind: gl.constexpr = out.dtype.element_ty
        if bias is not None:
            total += gl.load(bias + row, mask=row < rows, other=0.0).to(gl.float32)
        place = token
        if order is not None:
            place = gl.load(order + token, mask=token < tokens, other=0)
        at = out + place.to(gl.int64) * out_stride + (column + row)
        if ADD:
            total = total.to(kind).to(gl.float32)
            total += gl.load(at, mask=mask, other=0.0).to(gl.float32)
        gl.store(at, total.to(kind), mask=mask)


@gluon.jit
def write_gated(
    out, total, factor_0, factor_1, bias_0, bias_1, tile, rows, first_token, tokens, out_stride,
    WARPS: gl.constexpr, TOKENS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of sums in which the upper half of the warps has `up`."""
    ROWS: gl.constexpr = 16 * WARPS
    BOTH: gl.constexpr = gl.BlockedLayout([WARPS // 2, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
    HERE: gl.constexpr = gl.SliceLayout(2, BOTH)
    kind: gl.constexpr = out.dtype.element_ty
    both = gl.reshape(total, (2, 2, WARPS // 2, 2, 2, 4, TOKENS))
    both = gl.permute(both, (2, 4, 5, 0, 3, 6, 1))
    both = gl.convert_layout(gl.reshape(both, (ROWS, TOKENS, 2)), BOTH)
    gate, up = gl.split(both)
    row = tile * ROWS + along(ROWS, 0, HERE)
    token = first_token + along(TOKENS, 1, HERE)
    if factor_0 is not None:
        gate *= gl.load(factor_0)
        up *= gl.load(factor_1)
    if bias_0 is not None:
        gate += gl.load(bias_0 + row, mask=row < rows, other=0.0).to(gl.float32)
    if bias_1 is not None:
        up += gl.load(bias_1 + row, mask=row < rows, other=0.0).to(gl.float32)
    gate, up = gate.to(kind).to(gl.float32), up.to(kind).to(gl.float32)
    product = _activated(gate, ACTIVATION).to(kind).to(gl.float32) * up
    at = out + token.to(gl.int64) * out_stride + row
    gl.store(at, product.to(kind), mask=(row < rows) & (token < tokens))
