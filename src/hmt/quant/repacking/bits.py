"""Numbers of a few bits each, packed into words or bytes, taken apart; parts seen in a dtype."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

# Of scales and numbers, by the names that safetensors headers have for them.
DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
}


def scales_as_f32(part: Tensor, dtype: str, *shape: int) -> Tensor:
    """Bytes uint8 [n] as scales of `shape`; "F8_E8M0" are powers of two, e stands for 2^(e - 127).

    dtype   as in safetensors headers
    """
    if dtype == "F8_E8M0":
        return torch.exp2(part.view(shape).float() - 127)
    return as_tensor(part, DTYPES[dtype], *shape).float()


def as_tensor(part: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Bytes uint8 [n] as a tensor of `dtype` and `shape`; copied only at an odd address."""
    return aligned(part, dtype).view(dtype).view(shape)


def aligned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes uint8 [n] that can be viewed as `dtype`; copied only at an odd address."""
    odd = part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize
    return part.clone() if odd else part


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of each row of words int32 [rows, n]: uint8 [rows, count].

    Number i has the `bits` bits (1 to 8) from bit i * bits of the row on, the lowest bits of the
    first word first, so that it may begin in one word and end in the next.
    """
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)[:, :count]
    first = torch.arange(count, device=words.device) * bits
    byte, shift = first // 8, first % 8
    wide = torch.nn.functional.pad(data, (0, 1)).to(torch.int16)  # behind the last number
    pairs = wide[:, byte] | wide[:, byte + 1] << 8
    return (pairs >> shift & (1 << bits) - 1).to(torch.uint8)


def unpack_strips(words: Tensor, bits: int, shifts: Sequence[int], low: int, high: int) -> Tensor:
    """Lines [low, high) of a matrix whose strips lie in the same words: uint8 [lines, width].

    words   [n, width]: its line i has lines i, n + i, 2 n + i ... of the matrix
    shifts  of each strip in its word
    """
    line = torch.arange(low, high)
    shift = torch.tensor(shifts, dtype=words.dtype)[line // len(words)]
    return (words[line % len(words)] >> shift[:, None] & (1 << bits) - 1).to(torch.uint8)


def pairs_or_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """`unpack_bits`; but an even count of 4 bits, two in a byte as they lie: [rows, count / 2].

    See `fill_grouped`.
    """
    if bits == 4 and count % 2 == 0:
        return words.contiguous().view(torch.uint8)[:, : count // 2]
    return unpack_bits(words, bits, count)


def unpack_nibbles(pairs: Tensor) -> Tensor:
    """Two numbers of 4 bits in a byte, the low ones first: uint8 [..., n] to [..., 2 n]."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
