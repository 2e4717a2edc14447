"""Products of few tokens with weights in Packing.BLOCKS, on CUDA cores.

Reading is all that counts with few tokens.  A thread has the same part of a block of four rows, so
that weights come 16 bytes at a time, and what it loads of tokens serves four rows.  Codes are
multiplied as bytes, four in one instruction, with tokens rounded to int8 per 256 inputs; the
products of 64 inputs of a row (32 of small blocks) are exact integers.  Tokens that are not rounded
are multiplied in f32.

Sums of lanes are added in an order that only the number of inputs decides: it is that of neither
tokens nor rows, so the results for a token are the same whatever others there are.  The reference
adds 256 inputs as integers, and these in ascending order; the same otherwise.
"""

# ruff: noqa: RUF005 - Triton's tuples are joined by `+`

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK, BLOCK_SHAPES, Encoding
from hmt.kernels.reference import gguf_blocks
from hmt.kernels.triton.device_math import store_block_codes
from hmt.kernels.triton.gemm.block_codes import MINIMA, OFFSETS, STRIDED, block_scales, sixteen
from hmt.kernels.triton.gemm.unpack import INTERPRETED
from hmt.kernels.triton.weight_codes import dot4, pointers

_GRIDS_OF_EIGHT = {
    Encoding.IQ2_XXS: (8, 25, 43),
    Encoding.IQ2_XS: (8, 25, 43),
    Encoding.IQ2_S: (8, 25, 43),
    Encoding.IQ1_S: (-1, 0, 1),
    Encoding.IQ1_M: (-1, 0, 1),
}
_GRIDS_OF_FOUR = (Encoding.IQ3_XXS, Encoding.IQ3_S)
_QUANTIZED_AT_ONCE = 4  # blocks of activations


@cache
def block_constants(encoding: Encoding) -> dict[str, Any]:
    """What kernels are compiled for."""
    shape = BLOCK_SHAPES[encoding]
    kind = str(encoding)
    return {
        "KIND": kind,
        "WORDS": shape.words,
        "SMALL": shape.numbers == 32,
        "STRIDED": kind in STRIDED,
        "OFFSET": OFFSETS.get(kind, 0),
        "LEAST": kind in MINIMA,
        "APART": shape.scale_at is not None,
        "ASM": not INTERPRETED,
    }


@cache
def block_grid(encoding: Encoding, device: torch.device) -> Tensor | None:
    """The grid of an IQ type as `block_codes` reads it, int32 [entries]; None for other types."""
    # Made once, and before anything is captured: `linear` is called for every weight before.
    if encoding in _GRIDS_OF_FOUR:
        grid = gguf_blocks.grid(encoding).contiguous()
        return grid.view(torch.int32).flatten().to(device)
    if encoding not in _GRIDS_OF_EIGHT:
        return None
    entries = gguf_blocks.grid(encoding).long()
    values = torch.tensor(_GRIDS_OF_EIGHT[encoding])
    places = (entries[..., None] == values).long().argmax(-1)
    packed = torch.zeros_like(places[:, 0])
    for index in range(8):
        packed |= places[:, index] << (4 * index)
    return packed.to(torch.int32).to(device)


def lanes_of(encoding: Encoding, blocks: int) -> int:
    """How many lanes work on so many blocks of 256 inputs: see `lane_of`."""
    return blocks * (8 if BLOCK_SHAPES[encoding].numbers == 32 else 4)


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """Tokens as the kernels of blocks take them.

    numbers   rounded: int8 [tokens, 64, blocks of 256, 4], so that lanes that work on different
              blocks read neighbouring words; otherwise the tokens
    scales    f32 [tokens, blocks], of rounded ones
    sums      int32 [tokens, 16, blocks]: of 16 codes each
    """

    numbers: Tensor
    scales: Tensor
    sums: Tensor
    rounded: bool


def block_tokens(x: Tensor, *, rounded: bool) -> BlockTokens:
    """X [tokens, in] as tokens for blocks; rounded as `reference.quantize_activation_blocks`."""
    if not rounded:
        return BlockTokens(x, x, x, False)
    tokens, columns = x.shape
    blocks = triton.cdiv(columns, ACTIVATION_BLOCK)
    numbers = torch.empty(tokens, 64, blocks, 4, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, blocks, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, 16, blocks, dtype=torch.int32, device=x.device)
    # Not `dependent`: such launches end the chains of kernels that begin early (see `pdl`).
    _quantize_kernel[(triton.cdiv(blocks, _QUANTIZED_AT_ONCE), tokens)](
        x, numbers, scales, sums, columns, blocks, x.stride(0), BLOCKS=_QUANTIZED_AT_ONCE,
        num_warps=4,
    )  # fmt: skip
    return BlockTokens(numbers, scales, sums, True)


@triton.jit
def _quantize_kernel(x, numbers, scales, sums, columns, blocks, x_row, BLOCKS: tl.constexpr):
    """Axis 0: BLOCKS blocks of 256; axis 1: tokens."""
    token = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, 256)
    at = (block * 256)[:, None] + column[None, :]
    values = tl.load(x + token * x_row + at, mask=at < columns, other=0.0).to(tl.float32)
    block = block[:, None]
    store_block_codes(values, token, block, block < blocks, blocks, numbers, scales, sums)


@triton.jit
def word_of(part, G: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr):
    """Which fours of the 256 inputs the words of `sixteen` are multiplied with: the first of 4."""
    if SMALL:
        first = 8 * part + 4 * G
    elif STRIDED:
        first = 32 * (part // 2) + 8 * G + 4 * (part % 2)
    else:
        first = 16 * part + 4 * G
    return first


@triton.jit
def lane_of(lane, start, blocks, BLOCKS: tl.constexpr, SMALL: tl.constexpr):
    """What lanes [lanes, 1] have of BLOCKS times 256 inputs from `start` on, each [lanes, 1].

    The block in the weight, the part, the block of 256 inputs, and whether there is such a one.
    Neighbouring lanes have the same part of neighbouring blocks.  Where there is none, lanes have
    the last.
    """
    PARTS: tl.constexpr = 8 if SMALL else 4
    part = lane // BLOCKS % PARTS
    wide = start + lane % BLOCKS
    block = wide * 8 + part if SMALL else wide
    inside = block < blocks
    block = tl.minimum(block, blocks - 1)
    if SMALL:
        part = block % 8
        wide = block // 8
    else:
        wide = block
    return block, part, wide, inside


@triton.jit
def _code(word, AT: tl.constexpr, OFFSET: tl.constexpr):
    """The number of byte AT of words of codes, f32."""
    return (((word << (24 - 8 * AT)) >> 24) - OFFSET).to(tl.float32)


@triton.jit
def _four_products(word, x, OFFSET: tl.constexpr):
    """Four codes times four numbers at x, and the sum of these, f32."""
    first, second = tl.load(x).to(tl.float32), tl.load(x + 1).to(tl.float32)
    third, fourth = tl.load(x + 2).to(tl.float32), tl.load(x + 3).to(tl.float32)
    product = _code(word, 0, OFFSET) * first + _code(word, 1, OFFSET) * second
    product += _code(word, 2, OFFSET) * third + _code(word, 3, OFFSET) * fourth
    return product, first + second + third + fourth


@triton.jit
def lane_dots(
    data, scales, grid, lane, x, x_scales, x_sums, wides, x_row, last,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    ROUNDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What lanes add for each of TOKENS tokens: as many f32 [lanes, 16].

    data, scales   int64 addresses [lanes, 1]: of 16 rows of a weight
    lane           of `lane_of`
    x, x_scales, x_sums   of `BlockTokens`, at the first token; pointers, or [lanes, 1] of them
    wides, x_row   blocks of 256 inputs; numbers from token to token where they are not rounded
    last           the last token that there is, which those behind it are taken for
    """
    block, part, wide, inside = lane
    row = tl.arange(0, 16)[None, :]
    words = pointers(data + block.to(tl.int64) * (WORDS * 64), tl.int32) + row
    taken = pointers(scales + block.to(tl.int64) * 32, tl.float16) + row
    d, e = block_scales(words, taken, KIND)
    d = tl.where(inside, d, 0.0)
    e = tl.where(inside, e, 0.0)
    nothing = tl.zeros(d.shape, tl.int32)
    sums = (nothing,) * TOKENS
    least_sums = (nothing,) * TOKENS
    if not ROUNDED:
        sums = (nothing.to(tl.float32),) * TOKENS
        least_sums = sums
    for G in tl.static_range(2 if SMALL else 4):
        one, two, three, four, by, least = sixteen(words, part, grid, KIND, G, ASM)
        at = word_of(part, G, SMALL, STRIDED)
        new, new_least = (), ()
        for token in tl.static_range(TOKENS):
            its = token if token == 0 else tl.minimum(token, last)
            if ROUNDED:
                own = x + (its * 64 + at) * wides + wide
                dot = dot4(one, tl.load(own), nothing, ASM)
                dot = dot4(two, tl.load(own + wides), dot, ASM)
                dot = dot4(three, tl.load(own + 2 * wides), dot, ASM)
                dot = dot4(four, tl.load(own + 3 * wides), dot, ASM)
                if OFFSET > 0 or LEAST:
                    total = tl.load(x_sums + (its * 16 + at // 4) * wides + wide)
                    if OFFSET > 0:
                        dot -= OFFSET * total
                    if LEAST:
                        new_least = new_least + (least_sums[token] + least * total,)  # type: ignore[assignment]
                new = new + (sums[token] + dot * by,)  # type: ignore[assignment]
            else:
                own = x + its * x_row + (wide * 64 + at) * 4
                first, first_x = _four_products(one, own, OFFSET)
                second, second_x = _four_products(two, own + 4, OFFSET)
                third, third_x = _four_products(three, own + 8, OFFSET)
                fourth, fourth_x = _four_products(four, own + 12, OFFSET)
                new = new + (sums[token] + (first + second + third + fourth) * by,)  # type: ignore[assignment]
                if LEAST:
                    total = first_x + second_x + third_x + fourth_x
                    new_least = new_least + (least_sums[token] + least * total,)  # type: ignore[assignment]
        sums = new
        if LEAST:
            least_sums = new_least
    out = ()
    for token in tl.static_range(TOKENS):
        by_d, by_e = d, e
        if ROUNDED:
            its = token if token == 0 else tl.minimum(token, last)
            scale = tl.load(x_scales + its * wides + wide)
            by_d = d * scale
            by_e = e * scale
        result = sums[token].to(tl.float32) * by_d
        if LEAST:
            result += least_sums[token].to(tl.float32) * by_e
        out = out + (result,)  # type: ignore[assignment]
    return out
