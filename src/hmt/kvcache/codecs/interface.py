"""What a codec of pages is: rows of keys or values to bytes, and back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS


class Codec(ABC):
    """Pages of keys, or of values, of one layer as bytes.

    A unit of `pages`, as a rule one, takes `unit_bytes` and can be read without any other.
    Everything is computed over all pages and heads at once, on the device that the rows are on.
    Numbers have to be finite; zeros stay zeros.

    heads   rows of a token
    dim     numbers of a row
    """

    pages = 1

    def __init__(self, heads: int, dim: int) -> None:
        self.heads = heads
        self.dim = dim

    @property
    @abstractmethod
    def unit_bytes(self) -> int:
        """Of `pages` of 16 tokens."""

    def nbytes(self, tokens: int) -> int:
        """Of `tokens` in whole units."""
        assert tokens % (PAGE_TOKENS * self.pages) == 0, "units are encoded as a whole"
        return tokens // (PAGE_TOKENS * self.pages) * self.unit_bytes

    def encode(self, rows: Tensor) -> Tensor:
        """Bytes of `rows`: uint8 [units, unit_bytes].

        rows   float [16 * pages * units, heads, dim]
        """
        encoded = self._encode(rows.float().unflatten(0, (-1, PAGE_TOKENS)))
        assert encoded.shape[1] == self.unit_bytes
        return encoded

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [16 * pages * units, heads, dim] of uint8 [units, unit_bytes], in `dtype`."""
        return self._decode(data).flatten(0, 1).to(dtype)

    @abstractmethod
    def _encode(self, rows: Tensor) -> Tensor:
        """Bytes [units, unit_bytes] of f32 [pages of all units, 16, heads, dim]."""

    @abstractmethod
    def _decode(self, data: Tensor) -> Tensor:
        """The other way round."""


def joined(*parts: Tensor) -> Tensor:
    """What `parts` [pages, ...] hold, page by page: uint8 [pages, bytes]."""
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], dim=1)


def split_parts(data: Tensor, parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """The parts that `joined` put together, by dtype and shape of one page; copies."""
    found, start = [], 0
    for dtype, shape in parts:
        end = start + torch.Size(shape).numel() * dtype.itemsize
        part = data[:, start:end].clone(memory_format=torch.contiguous_format)
        found.append(part.view(dtype).unflatten(1, shape))
        start = end
    assert start == data.shape[1]
    return found


def nibbles(codes: Tensor) -> Tensor:
    """Codes 0 .. 15 [..., 2 n] as bytes [..., n]: the first in the low half."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """The other way round: uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
