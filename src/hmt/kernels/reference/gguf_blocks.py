"""What the blocks of ggml's types hold, as integers and the f16 scales that multiply them.

Layouts: ggml's ggml-common.h; the grids of the IQ types are those of the `gguf` package.  Every
type is of one form: with an integer `code` per number, an integer `scale` per group, an integer
`minimum` per group in some types, and floats per block,

    number = (d * scale) * code + e * minimum

and `d * scale` as well as `e * minimum` are exact in f32, so that the number is what ggml's
dequantisers compute, to the last bit.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmt.contracts.encoding import Encoding

# ggml's kvalues_iq4nl: what the codes of IQ4_NL and IQ4_XS stand for.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Integers(NamedTuple):
    """Numbers of some blocks.

    codes    int8 [blocks, numbers]
    scales   int32 [blocks, groups]
    d        f32 [blocks, 1]
    minima   int32 [blocks, groups], or None
    e        f32 [blocks, 1], or None
    """

    codes: Tensor
    scales: Tensor
    d: Tensor
    minima: Tensor | None = None
    e: Tensor | None = None


def block_integers(encoding: Encoding, raw: Tensor) -> Integers:
    """What blocks uint8 [blocks, bytes] of one type hold."""
    return _READERS[encoding](raw)


@cache
def grid(encoding: Encoding) -> Tensor:
    """The table of an IQ type: int8 [entries, 8 or 4]; of IQ1_S and IQ1_M -1, 0 and 1."""
    from gguf import quants  # imports mistral_common where that is there, which takes half a second

    source = getattr(quants, encoding.name)
    source.init_grid()
    return torch.from_numpy(source.grid.astype(np.int8)).reshape(source.grid_shape)


def _half(raw: Tensor, at: int) -> Tensor:
    """The f16 at byte `at` of each block: f32 [blocks, 1]."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _words(raw: Tensor, first: int, end: int) -> Tensor:
    """Little-endian 16-bit words of bytes [first, end) of each block: int32 [blocks, words]."""
    return raw[:, first:end].contiguous().view(torch.uint16).int()


def _bits(raw: Tensor, run: int, *shifts: int, mask: int) -> Tensor:
    """Numbers of a few bits: of each `run` bytes, all at the first shift, all at the next, ..."""
    runs = raw.reshape(len(raw), -1, run)
    numbers = torch.empty(len(raw), runs.shape[1], len(shifts), run, dtype=torch.uint8)
    numbers = numbers.to(raw.device)
    for index, shift in enumerate(shifts):  # torch is slow where shifts are a tensor
        torch.bitwise_and(runs >> shift, mask, out=numbers[:, :, index])
    return numbers.view(len(raw), -1)


def _nibbles(raw: Tensor, run: int) -> Tensor:
    return _bits(raw, run, 0, 4, mask=15)


def _ones(raw: Tensor, groups: int = 1) -> Tensor:
    return torch.ones(len(raw), groups, dtype=torch.int32, device=raw.device)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bit i of the four bytes for number i, as 16 or 0: [blocks, 32]."""
    bits = torch.stack([raw >> bit & 1 for bit in range(8)], dim=2)
    return (bits << 4).view(len(raw), 32)


def _q5_0(raw: Tensor) -> Integers:
    codes = (_nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])).view(torch.int8) - 16
    return Integers(codes, _ones(raw), _half(raw, 0))


def _q5_1(raw: Tensor) -> Integers:
    codes = (_nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])).view(torch.int8)
    return Integers(codes, _ones(raw), _half(raw, 0), _ones(raw), _half(raw, 2))


def _q8_0(raw: Tensor) -> Integers:
    return Integers(raw[:, 2:].contiguous().view(torch.int8), _ones(raw), _half(raw, 0))


def _q2_k(raw: Tensor) -> Integers:
    codes = _bits(raw[:, 16:80], 32, 0, 2, 4, 6, mask=3).view(torch.int8)
    scales, minima = (raw[:, :16] & 15).int(), (raw[:, :16] >> 4).int()
    return Integers(codes, scales, _half(raw, 80), minima, -_half(raw, 82))


def _q3_k(raw: Tensor) -> Integers:
    low = _bits(raw[:, 96:104], 8, 0, 4, mask=15)
    high = _bits(raw[:, 104:108], 4, 0, 2, 4, 6, mask=3)
    scales = (low | high << 4).int() - 32
    # A third bit that is not set takes four away.
    third = _bits(raw[:, :32], 32, *range(8), mask=1) << 2
    codes = (_bits(raw[:, 32:96], 32, 0, 2, 4, 6, mask=3) | third).view(torch.int8) - 4
    return Integers(codes, scales, _half(raw, 108))


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, each int32 [blocks, 8]: ggml's get_scale_min_k4."""
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return scales.int(), minima.int()


def _q4_k(raw: Tensor) -> Integers:
    scales, minima = _k_scales(raw)
    codes = _nibbles(raw[:, 16:], 32).view(torch.int8)
    return Integers(codes, scales, _half(raw, 0), minima, -_half(raw, 2))


def _q5_k(raw: Tensor) -> Integers:
    scales, minima = _k_scales(raw)
    fifth = _bits(raw[:, 16:48], 32, *range(8), mask=1) << 4
    codes = (_nibbles(raw[:, 48:], 32) | fifth).view(torch.int8)
    return Integers(codes, scales, _half(raw, 0), minima, -_half(raw, 2))


def _q6_k(raw: Tensor) -> Integers:
    high = _bits(raw[:, 128:192], 32, 0, 2, 4, 6, mask=3) << 4
    codes = (_nibbles(raw[:, :128], 64) | high).view(torch.int8) - 32
    return Integers(codes, raw[:, 192:208].contiguous().view(torch.int8).int(), _half(raw, 208))


def _iq4(nibbles: Tensor) -> Tensor:
    table = torch.tensor(IQ4_VALUES, dtype=torch.int8, device=nibbles.device)
    return table[nibbles.long()]


def _iq4_nl(raw: Tensor) -> Integers:
    return Integers(_iq4(_nibbles(raw[:, 2:], 16)), _ones(raw), _half(raw, 0))


def _iq4_xs(raw: Tensor) -> Integers:
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), dim=2).view(-1, 8)
    high = torch.stack([raw[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 8)
    scales = (low | high << 4).int() - 32
    return Integers(_iq4(_nibbles(raw[:, 8:], 16)), scales, _half(raw, 0))


def _grid_codes(encoding: Encoding, indices: Tensor, signs: Tensor) -> Tensor:
    """Entries of a grid [blocks, n], negative where bits of signs [blocks, m] of 8 numbers are."""
    codes = grid(encoding).to(indices.device)[indices.long()].view(len(indices), -1, 8)
    bits = torch.stack([signs >> bit & 1 for bit in range(8)], dim=2)
    return torch.where(bits.bool(), -codes, codes).view(len(indices), -1)


def _even_signs(seven: Tensor) -> Tensor:
    """Seven sign bits, and an eighth that makes the number of minus signs even."""
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | ((parity ^ parity >> 1) & 1) << 7


def _packed_signs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Of words int64 [blocks, n]: signs of 4 x 8 numbers [blocks, 4 n], and odd scales [blocks, n].

    Four times seven bits, and four bits s that stand for s + 1/2: twice that is 2 s + 1.
    """
    sevens = torch.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], dim=2)
    return _even_signs(sevens).view(len(words), -1), (2 * (words >> 28) + 1).int()


def _long_words(raw: Tensor) -> Tensor:
    halves = _words(raw, 0, raw.shape[1]).long().view(len(raw), -1, 2)
    return halves[:, :, 0] | halves[:, :, 1] << 16


def _odd_scales(raw: Tensor) -> Tensor:
    """2 s + 1 of the nibbles of bytes, the low one first: int32 [blocks, 2 n]."""
    nibbles = torch.stack((raw & 15, raw >> 4), dim=2).view(len(raw), -1)
    return 2 * nibbles.int() + 1


def _iq2_xxs(raw: Tensor) -> Integers:
    pairs = raw[:, 2:].reshape(len(raw), 8, 8)
    signs, scales = _packed_signs(_long_words(pairs[:, :, 4:].reshape(len(raw), -1)))
    codes = _grid_codes(Encoding.IQ2_XXS, pairs[:, :, :4].reshape(len(raw), -1), signs)
    return Integers(codes, scales, _half(raw, 0) / 8)


def _iq2_xs(raw: Tensor) -> Integers:
    words = _words(raw, 2, 66)
    codes = _grid_codes(Encoding.IQ2_XS, words & 511, _even_signs(words >> 9))
    return Integers(codes, _odd_scales(raw[:, 66:]), _half(raw, 0) / 8)


def _iq2_s(raw: Tensor) -> Integers:
    high = torch.stack([raw[:, 66:74] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    indices = raw[:, 2:34].int() | high.view(-1, 32).int() << 8
    codes = _grid_codes(Encoding.IQ2_S, indices, raw[:, 34:66])
    return Integers(codes, _odd_scales(raw[:, 74:]), _half(raw, 0) / 8)


def _iq3_xxs(raw: Tensor) -> Integers:
    signs, scales = _packed_signs(_long_words(raw[:, 66:]))
    return Integers(_grid_codes(Encoding.IQ3_XXS, raw[:, 2:66], signs), scales, _half(raw, 0) / 4)


def _iq3_s(raw: Tensor) -> Integers:
    high = torch.stack([raw[:, 66:74] >> bit & 1 for bit in range(8)], dim=2).view(-1, 64)
    indices = raw[:, 2:66].int() | high.int() << 8
    codes = _grid_codes(Encoding.IQ3_S, indices, raw[:, 74:106])
    return Integers(codes, _odd_scales(raw[:, 106:]), _half(raw, 0))


def _iq1(encoding: Encoding, indices: Tensor, negative: Tensor) -> Tensor:
    """Eight times (entries -1, 0, 1, plus or minus an eighth); `negative` [blocks, n / entries]."""
    entries = grid(encoding).to(indices.device)[indices.long()]  # [blocks, 32, 8]
    eighth = torch.where(negative.bool(), -1, 1).to(torch.int8)
    return (8 * entries + eighth[:, :, None]).view(len(indices), -1)


def _iq1_s(raw: Tensor) -> Integers:
    high = _words(raw, 34, 50)
    three = torch.stack([high >> shift & 7 for shift in (0, 3, 6, 9)], dim=2).view(-1, 32)
    indices = raw[:, 2:34].int() | three << 8
    codes = _iq1(Encoding.IQ1_S, indices, (high >> 15).repeat_interleave(4, 1))
    return Integers(codes, 2 * (high >> 12 & 7) + 1, _half(raw, 0) / 8)


def _iq1_m(raw: Tensor) -> Integers:
    high = torch.stack((raw[:, 32:48] & 15, raw[:, 32:48] >> 4), dim=2).view(-1, 32)
    indices = raw[:, :32].int() | (high & 7).int() << 8
    words = _words(raw, 48, 56)
    scales = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=2).view(-1, 16)
    bits = sum((words[:, i] >> 12) << 4 * i for i in range(4))
    assert isinstance(bits, Tensor)
    d = bits.to(torch.uint16).view(torch.float16).float()[:, None]
    return Integers(_iq1(Encoding.IQ1_M, indices, high >> 3), 2 * scales + 1, d / 8)


def _tq1_0(raw: Tensor) -> Integers:
    # Five digits of base 3 in a byte, as the fraction of 256 that is nearest from above.
    def digits(part: Tensor, count: int) -> Tensor:
        powers = torch.stack([part * 3**n for n in range(count)], dim=1)  # wraps at 256
        return (powers.int() * 3 >> 8).view(len(raw), -1)

    codes = torch.cat(
        (digits(raw[:, :32], 5), digits(raw[:, 32:48], 5), digits(raw[:, 48:52], 4)), dim=1
    )
    return Integers(codes.to(torch.int8) - 1, _ones(raw), _half(raw, 52))


def _tq2_0(raw: Tensor) -> Integers:
    codes = _bits(raw[:, :64], 32, 0, 2, 4, 6, mask=3).view(torch.int8) - 1
    return Integers(codes, _ones(raw), _half(raw, 64))


_READERS: dict[Encoding, Callable[[Tensor], Integers]] = {
    Encoding.Q5_0: _q5_0,
    Encoding.Q5_1: _q5_1,
    Encoding.Q8_0: _q8_0,
    Encoding.Q2_K: _q2_k,
    Encoding.Q3_K: _q3_k,
    Encoding.Q4_K: _q4_k,
    Encoding.Q5_K: _q5_k,
    Encoding.Q6_K: _q6_k,
    Encoding.IQ4_NL: _iq4_nl,
    Encoding.IQ4_XS: _iq4_xs,
    Encoding.IQ2_XXS: _iq2_xxs,
    Encoding.IQ2_XS: _iq2_xs,
    Encoding.IQ2_S: _iq2_s,
    Encoding.IQ3_XXS: _iq3_xxs,
    Encoding.IQ3_S: _iq3_s,
    Encoding.IQ1_S: _iq1_s,
    Encoding.IQ1_M: _iq1_m,
    Encoding.TQ1_0: _tq1_0,
    Encoding.TQ2_0: _tq2_0,
}
