"""Launches of the kernels for few tokens, with block sizes by shape."""

from collections.abc import Sequence
from operator import is_

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.triton.gemm.dequantize import offset_kind, offsets_of
from hmt.kernels.triton.gemm.gemv_w8 import multiply_one_row, takes_one_row
from hmt.kernels.triton.gemm.skinny_w4 import few_tokens
from hmt.kernels.triton.gemm.skinny_w8 import few_tokens_rows
from hmt.kernels.triton.gemm.unpack import INTERPRETED, code_unit
from hmt.kernels.triton.pdl import dependent
from hmt.kernels.triton.single_tokens import are_single
from hmt.kernels.weight_cache import WeightCache

# Block sizes of `few_tokens`, by tokens and blocks per group (0: groups of 16 inputs).  Found by
# measuring on an H200, in graphs of many weights.  Weights with so many rows that every
# multiprocessor has several programs do best with small ones; where each has one program at most,
# that takes many warps, the more the more inputs there are.
_MANY_ROWS, _SOME_ROWS, _MANY_INPUTS = 8193, 4225, 8192
_NAMES = ("WARPS", "DEPTH", "BLOCKS", "PAIRS", "SPLIT", "TOKENS")
_Sizes = tuple[int, int, int, int, int, int]
_PANEL_SIZES: dict[int, dict[int, tuple[_Sizes, _Sizes, _Sizes, _Sizes]]] = {
    # many rows; some; few; few with many inputs
    1: {
        0: ((8, 1, 2, 1, 4, 2), (8, 1, 4, 1, 8, 1), (16, 1, 4, 1, 8, 1), (16, 1, 4, 1, 8, 1)),
        1: ((8, 1, 4, 1, 4, 2), (8, 1, 8, 1, 8, 1), (8, 1, 8, 1, 8, 1), (16, 1, 8, 1, 8, 1)),
    },
    2: {
        0: ((8, 1, 2, 1, 4, 2), (8, 1, 2, 1, 4, 2), (16, 1, 2, 1, 4, 2), (16, 1, 2, 1, 4, 2)),
        1: ((8, 1, 4, 1, 4, 2), (8, 1, 4, 1, 4, 2), (16, 1, 4, 1, 4, 2), (16, 1, 4, 1, 4, 2)),
    },
    4: {
        0: ((8, 1, 1, 1, 2, 4), (8, 2, 1, 1, 2, 4), (8, 2, 1, 1, 2, 4), (8, 2, 1, 1, 2, 4)),
        1: ((4, 2, 2, 1, 2, 4), (8, 2, 2, 1, 2, 4), (8, 2, 2, 1, 2, 4), (16, 2, 2, 1, 2, 4)),
    },
    8: {
        0: ((8, 1, 1, 1, 2, 8), (8, 1, 1, 1, 2, 8), (16, 1, 1, 1, 2, 8), (16, 1, 1, 1, 2, 8)),
        1: ((4, 2, 1, 1, 1, 8), (8, 2, 1, 1, 1, 8), (8, 4, 1, 1, 1, 8), (8, 4, 1, 1, 1, 8)),
    },
    16: {
        0: ((4, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16)),
        1: ((4, 1, 1, 2, 1, 16), (8, 2, 1, 1, 1, 16), (8, 2, 1, 1, 1, 16), (8, 2, 1, 1, 1, 16)),
    },
    32: {
        0: ((4, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16), (8, 1, 1, 1, 2, 16)),
        1: ((4, 1, 1, 2, 1, 32), (8, 1, 1, 1, 1, 32), (8, 1, 1, 1, 1, 32), (8, 1, 1, 1, 1, 32)),
    },
}
# Two weights at once, of one token: two pairs of panels make a program large.
_GATED_SIZES: dict[int, _Sizes] = {0: (4, 1, 4, 2, 8, 1), 1: (4, 1, 4, 2, 4, 2)}
_INT8_MANY_INPUTS: _Sizes = (16, 1, 4, 1, 4, 2)  # of tokens of int8, one or two
_CHUNK_UNIT = 128  # rows; no program works on two chunks
# Kept with the first of several weights: the others, and where codes and scales of all lie.
_ADDRESSES: WeightCache[tuple[tuple[WeightTensor, ...], Tensor]] = WeightCache()


def multiply_panels(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    alone: bool = False,
    add: bool = False,
) -> None:
    """x times one to three weights in panels, side by side, to out [tokens, rows of all].

    With `alone`, block sizes are those that each weight has alone, and so are its results.  With
    `add`, products are rounded and added to what `out` holds.
    """
    w = weights[0]
    rows = [one.shape[0] for one in weights]
    sizes = _panel_sizes(x, max(rows) if alone else sum(rows), w)
    tiles = sum(triton.cdiv(n, 32 * sizes["PAIRS"]) for n in rows)
    _launch_panels(out, x, token_scales, weights, biases, sizes, tiles, COUNT=len(weights), ADD=add)


def multiply_gated(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    activation: str,
) -> None:
    """activation(x times gate) * (x times up) to out [tokens, rows], of weights (gate, up)."""
    sizes = _gated_sizes(x, weights[0])
    tiles = triton.cdiv(weights[0].shape[0], 32)
    _launch_panels(
        out, x, token_scales, weights, biases, sizes, tiles,
        COUNT=1, ACTIVATION=activation,
    )  # fmt: skip


def _launch_panels(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    sizes: dict[str, int],
    tiles: int,
    *,
    COUNT: int,
    ACTIVATION: str = "",
    ADD: bool = False,
) -> None:
    w, tokens = weights[0], len(x)
    given: list[WeightTensor | None] = [*weights, None, None][:3]
    blocks = w.shape[1] // 32
    few_tokens[(tiles, triton.cdiv(tokens, sizes["TOKENS"]))](
        out,
        x,
        token_scales,
        *(None if one is None else one.data for one in given),
        *(None if one is None else one.scales for one in given),
        *(None if one is None else offsets_of(one) for one in given),
        *(None if one is None else one.factor for one in given),
        *[*biases, None, None][:3],
        *(0 if one is None else one.shape[0] for one in given),
        tokens,
        blocks,
        x.stride(0),
        out.stride(0),
        COUNT=COUNT,
        GROUP_BLOCKS=w.group_size // 32,
        E2M1=w.encoding is not Encoding.INT4_GROUP,
        OFFSETS=offset_kind(w),
        UNIT=code_unit(w.encoding, x.dtype),
        **sizes,
        EVEN=blocks % (sizes["WARPS"] * sizes["DEPTH"] * sizes["BLOCKS"]) == 0,
        ACTIVATION=ACTIVATION,
        ADD=ADD,
        num_warps=sizes["WARPS"],
        num_stages=1,
        **dependent(x.device),
    )


def _panel_sizes(x: Tensor, rows: int, w: WeightTensor) -> dict[str, int]:
    """Block sizes of `few_tokens` that multiplies x with `rows` rows in all."""
    tokens, group_blocks = _sized_by(x), w.group_size // 32
    place = 0 if rows >= _MANY_ROWS else 1 if rows >= _SOME_ROWS else 2
    if place == 2 and w.shape[1] >= _MANY_INPUTS:
        place = 3
    columns = next(most for most in _PANEL_SIZES if tokens <= most or most == 32)
    if group_blocks <= 1:
        sizes = _PANEL_SIZES[columns][group_blocks][place]
        if place == 3 and group_blocks == 1 and tokens <= 2 and x.dtype is torch.int8:
            sizes = _INT8_MANY_INPUTS
    else:
        blocks = next(count for count in (4, 2, 1) if group_blocks % count == 0)
        width = max(8, columns)
        sizes = (4 if place == 0 else 8, 1, blocks if width == 8 else 1, 1, 1, width)
    return dict(zip(_NAMES, sizes, strict=True))


def _sized_by(x: Tensor) -> int:
    """Tokens that block sizes are for: sums are in their order."""
    return 1 if are_single() else len(x)


def _gated_sizes(x: Tensor, w: WeightTensor) -> dict[str, int]:
    """Block sizes of `few_tokens` where it takes two weights at once."""
    group_blocks = w.group_size // 32
    if _sized_by(x) <= 2 - (group_blocks == 0) and group_blocks <= 1:
        return dict(zip(_NAMES, _GATED_SIZES[group_blocks], strict=True))
    return {**_panel_sizes(x, 2 * w.shape[0], w), "PAIRS": 2}


def multiply_rows(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    w: WeightTensor,
    bias: Tensor | None,
    *,
    chunk: bool = False,
    add: bool = False,
) -> None:
    """x times a weight of 8-bit codes in rows, to out [tokens, rows]; `add` as above.

    With `chunk`, results are those that the weight has in `multiply_chunks`.
    """
    rows, columns = w.shape
    if takes_one_row(x, w):
        assert w.scales is not None
        multiply_one_row(out, x, w.data, w.scales, bias, rows, add=add)
        return
    tile, group = (w.tile[0], w.tile[1]) if w.encoding is Encoding.FP8_BLOCK else (1, w.group_size)
    scale_columns = triton.cdiv(columns, group) if group else 1
    sizes = _row_sizes(_sized_by(x), rows, group, chunk=chunk)
    _launch_rows(
        out, x, token_scales, w.data, w.scales, bias, rows, columns, scale_columns, sizes,
        WORDS=_takes_words(x, w), TILE_ROWS=tile, GROUP=group, ADD=add,
    )  # fmt: skip


def multiply_chunks(
    out: Tensor, x: Tensor, token_scales: Tensor | None, weights: Sequence[WeightTensor]
) -> None:
    """x times weights that `are_chunks`, side by side, to out [tokens, rows of all]."""
    w = weights[0]
    codes, scales = chunk_addresses(weights)
    rows = sum(one.shape[0] for one in weights)
    if takes_one_row(x, w):
        multiply_one_row(out, x, codes, scales, None, rows, chunk_rows=w.shape[0])
        return
    sizes = _row_sizes(_sized_by(x), w.shape[0], 0, chunk=True)
    _launch_rows(
        out, x, token_scales, codes, scales, None, rows, w.shape[1], 1, sizes,
        CHUNK_ROWS=w.shape[0], WORDS=_takes_words(x, w), TILE_ROWS=1, GROUP=0,
    )  # fmt: skip


def are_chunks(weights: Sequence[WeightTensor], biases: Sequence[Tensor | None]) -> bool:
    """True for parts of a matrix of int8 with scales of rows, of the same size but for the last."""
    if _kept(weights) is not None:
        return all(bias is None for bias in biases)
    w, last = weights[0], weights[-1]
    alike = all(
        one.encoding is Encoding.INT8_CHANNEL
        and one.activations is w.activations
        and one.shape[1] == w.shape[1]
        and (one.shape[0] == w.shape[0] or (one is last and one.shape[0] < w.shape[0]))
        and one.data.data_ptr() % 16 == 0
        for one in weights
    )
    fit = len(weights) > 1 and w.shape[0] % _CHUNK_UNIT == 0 and w.shape[1] % 16 == 0
    return alike and fit and all(bias is None for bias in biases)


def chunk_addresses(weights: Sequence[WeightTensor]) -> tuple[Tensor, Tensor]:
    """Of codes and of scales, int64 [weights] on the device; kept for the next call."""
    table = _kept(weights)
    if table is None:
        where = [[w.data.data_ptr() for w in weights], [_scales_at(w) for w in weights]]
        table = torch.tensor(where).to(weights[0].data.device)
        _ADDRESSES[weights[0]] = tuple(weights[1:]), table
    return table[0], table[1]


def _kept(weights: Sequence[WeightTensor]) -> Tensor | None:
    others, table = _ADDRESSES.get(weights[0]) or ((), None)
    same = 0 < len(others) == len(weights) - 1 and all(map(is_, others, weights[1:]))
    return table if same else None


def _scales_at(w: WeightTensor) -> int:
    assert w.scales is not None
    return w.scales.data_ptr()


def _launch_rows(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
    scale_columns: int,
    sizes: dict[str, int],
    *,
    WORDS: bool,
    TILE_ROWS: int,
    GROUP: int,
    CHUNK_ROWS: int = 0,
    ADD: bool = False,
) -> None:
    step = 32 * sizes["WARPS"] * sizes["DEPTH"] * sizes["CHUNKS"]
    grid = (triton.cdiv(rows, 8 * sizes["EIGHTS"]), triton.cdiv(len(x), sizes["TOKENS"]))
    few_tokens_rows[grid](
        out,
        x,
        token_scales,
        codes,
        scales,
        bias,
        rows,
        columns,
        len(x),
        x.stride(0),
        out.stride(0),
        scale_columns,
        CHUNK_ROWS=CHUNK_ROWS,
        WORDS=WORDS,
        TILE_ROWS=TILE_ROWS,
        GROUP=GROUP,
        **sizes,
        EVEN=columns % step == 0,
        ADD=ADD,
        num_warps=sizes["WARPS"],
        num_stages=1,
        **dependent(x.device),
    )


def _takes_words(x: Tensor, w: WeightTensor) -> bool:
    """True where `few_tokens_rows` may load int8 codes of bf16 tokens as words."""
    whole = w.shape[1] % 4 == 0 and w.data.data_ptr() % 16 == 0
    return x.dtype is torch.bfloat16 and w.data.dtype is torch.int8 and whole and not INTERPRETED


def _row_sizes(tokens: int, rows: int, group: int, *, chunk: bool) -> dict[str, int]:
    """Block sizes of `few_tokens_rows`."""
    deep = rows < _MANY_ROWS and not chunk
    return {
        "WARPS": 4 if chunk and tokens <= 8 else 8,
        "DEPTH": 2 if deep else 1,
        "CHUNKS": 2 if group % 64 == 0 else 1,
        "EIGHTS": 4,
        "TOKENS": 8 if tokens <= 8 else 16,
        "AHEAD": 1 if deep else 4 if chunk else 2,
    }
