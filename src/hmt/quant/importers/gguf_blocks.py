"""What the blocks of each type of GGUF hold: codes, a scale per group, perhaps a minimum.

Each function takes blocks uint8 [blocks, bytes] and gives numbers code * scale (+ minimum).  Codes
of 4 bits without minima are those of INT4_GROUP, 8 more than the integer they stand for.  They come
in pairs: of 32 inputs byte k has number k in its low nibble and number k + 16 in its high nibble,
as ggml has them in most types, and HMT in panels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# ggml's kvalues_iq4nl: what the codes of IQ4_NL and IQ4_XS stand for.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Unpacked(NamedTuple):
    """Numbers of some blocks.

    codes    int8 or uint8 [blocks, numbers]; of 4 bits uint8 [blocks, numbers / 2]
    scales   f32, f16 or uint8 (MXFP4) [blocks, groups]
    minima   in the dtype of the scales [blocks, groups], or None
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of block: its bytes, its numbers, and how they are unpacked."""

    nbytes: int
    numbers: int
    unpack: Callable[[Tensor], Unpacked]


def _half(raw: Tensor, at: int) -> Tensor:
    """The f16 at byte `at` of each block: [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16)


def _bits(raw: Tensor, run: int, *shifts: int, mask: int) -> Tensor:
    """Numbers of a few bits: of each `run` bytes, all at the first shift, all at the next, ..."""
    runs = raw.reshape(len(raw), -1, run)
    numbers = torch.empty(len(raw), runs.shape[1], len(shifts), run, dtype=torch.uint8)
    for index, shift in enumerate(shifts):  # one number for all of them is what torch is fast at
        torch.bitwise_and(runs >> shift, mask, out=numbers[:, :, index])
    return numbers.view(len(raw), -1)


def _nibbles(raw: Tensor, run: int) -> Tensor:
    return _bits(raw, run, 0, 4, mask=15)


def _paired(codes: Tensor) -> Tensor:
    """Codes 0..15 [blocks, numbers] in pairs."""
    low, high = codes.view(len(codes), -1, 2, 16).unbind(2)
    return (low | high << 4).view(len(codes), -1)


def _q4_0(raw: Tensor) -> Unpacked:
    return Unpacked(raw[:, 2:], _half(raw, 0))


def _q4_1(raw: Tensor) -> Unpacked:
    return Unpacked(raw[:, 4:], _half(raw, 0), _half(raw, 2))


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bit i of the four bytes for number i, as 16 or 0: [blocks, 32]."""
    bits = torch.stack([raw >> bit & 1 for bit in range(8)], dim=2)
    return (bits << 4).view(len(raw), 32)


def _q5_0(raw: Tensor) -> Unpacked:
    codes = (_nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])).view(torch.int8) - 16
    return Unpacked(codes, _half(raw, 0).float())


def _q5_1(raw: Tensor) -> Unpacked:
    codes = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return Unpacked(codes, _half(raw, 0).float(), _half(raw, 2).float())


def _q8_0(raw: Tensor) -> Unpacked:
    return Unpacked(raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0).float())


def _q2_k(raw: Tensor) -> Unpacked:
    both = raw[:, :16]
    scales = _half(raw, 80).float() * (both & 15).float()
    minima = _half(raw, 82).float() * (both >> 4).float()
    return Unpacked(_paired(_bits(raw[:, 16:80], 32, 0, 2, 4, 6, mask=3)), scales, -minima)


def _q3_k(raw: Tensor) -> Unpacked:
    low = _bits(raw[:, 96:104], 8, 0, 4, mask=15)
    high = _bits(raw[:, 104:108], 4, 0, 2, 4, 6, mask=3)
    scales = (low | high << 4).view(torch.int8) - 32
    # A third bit that is not set takes four away.
    third = _bits(raw[:, :32], 32, *range(8), mask=1)
    codes = _bits(raw[:, 32:96], 32, 0, 2, 4, 6, mask=3) + (third << 2) + 4
    return Unpacked(_paired(codes), _half(raw, 108).float() * scales.float())


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, each f32 [blocks, 8]: ggml's get_scale_min_k4."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return _half(raw, 0).float() * scales.float(), -(_half(raw, 2).float() * minima.float())


def _q4_k(raw: Tensor) -> Unpacked:
    # Low nibbles of 32 bytes are 32 inputs, high ones the next 32.
    first, second = raw[:, 16:].view(len(raw), 4, 2, 16).unbind(2)
    pairs = torch.stack((first & 15 | second << 4, first >> 4 | second & 0xF0), dim=2)
    return Unpacked(pairs.view(len(raw), -1), *_k_scales(raw))


def _q5_k(raw: Tensor) -> Unpacked:
    fifth = _bits(raw[:, 16:48], 32, *range(8), mask=1) << 4
    return Unpacked(_nibbles(raw[:, 48:], 32) | fifth, *_k_scales(raw))


def _q6_k(raw: Tensor) -> Unpacked:
    high = _bits(raw[:, 128:192], 32, 0, 2, 4, 6, mask=3) << 4
    codes = (_nibbles(raw[:, :128], 64) | high).view(torch.int8) - 32
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return Unpacked(codes, _half(raw, 208).float() * scales.float())


def _table(nibbles: Tensor) -> Tensor:
    table = torch.tensor(_IQ4_NL, dtype=torch.int8)
    return table.index_select(0, nibbles.view(-1).int()).view(nibbles.shape)


def _iq4_nl(raw: Tensor) -> Unpacked:
    return Unpacked(_table(_nibbles(raw[:, 2:], 16)), _half(raw, 0).float())


def _iq4_xs(raw: Tensor) -> Unpacked:
    low = (raw[:, 4:8, None] >> torch.tensor((0, 4), dtype=torch.uint8) & 15).view(-1, 8)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)
    high = (raw[:, 2:4, None] >> shifts & 3).view(-1, 8)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _table(_nibbles(raw[:, 8:], 16))
    return Unpacked(codes, _half(raw, 0).float() * scales.float())


def _mxfp4(raw: Tensor) -> Unpacked:
    return Unpacked(raw[:, 1:], raw[:, :1])


BLOCKS = {
    "Q4_0": BlockType(18, 32, _q4_0),
    "Q4_1": BlockType(20, 32, _q4_1),
    "Q5_0": BlockType(22, 32, _q5_0),
    "Q5_1": BlockType(24, 32, _q5_1),
    "Q8_0": BlockType(34, 32, _q8_0),
    "Q2_K": BlockType(84, 256, _q2_k),
    "Q3_K": BlockType(110, 256, _q3_k),
    "Q4_K": BlockType(144, 256, _q4_k),
    "Q5_K": BlockType(176, 256, _q5_k),
    "Q6_K": BlockType(210, 256, _q6_k),
    "IQ4_NL": BlockType(18, 32, _iq4_nl),
    "IQ4_XS": BlockType(136, 256, _iq4_xs),
    "MXFP4": BlockType(17, 32, _mxfp4),
}
