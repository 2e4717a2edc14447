"""Four bits more for the few tokens that a codec hurts most."""

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.reference import divided
from hmt.kvcache.codecs.interface import Codec, from_nibbles, joined, nibbles, split_parts

_SIGMAS = 3.0
_SHARE = 0.005  # of the bytes of a page
_WIDTH = 16  # numbers of a part: a sub-channel
_LARGEST = 7  # codes are -7 .. 7, kept as code + 8
_BIAS = 127  # of exponents, as in an f32; 0 says that a record is not in use


class Residual(Codec):
    """Another codec's pages, with what it lost of outliers in 4 bits.

    An outlier is a part of a row whose error is more than 3 sigma, sigma being the median of the
    same part's errors over the tokens of the page: outliers come several in a row, and would hide
    each other in a mean.  Those with the largest errors get a record each.  There are as many
    records as _SHARE of the bytes hold, and one at least.

    base     the other codec, of single pages
    unit     the other codec's pages, then for each record: which part of the unit it is, in as many
             bytes as that takes, the exponent of its scale, and codes, two in a byte
    pages    that share their records
    """

    def __init__(self, base: Codec, pages: int = 1) -> None:
        assert base.pages == 1
        super().__init__(base.heads, base.dim)
        self.base = base
        self.pages = pages
        self.width = round_up(min(_WIDTH, base.dim), 2)
        self.parts = -(-base.dim // self.width)  # of a row
        self.records = max(1, int(self._base_bytes * _SHARE) // self.record_bytes)

    @property
    def record_bytes(self) -> int:
        """Of one outlier."""
        return self._place_bytes + 1 + self.width // 2

    @property
    @override
    def unit_bytes(self) -> int:
        return self._base_bytes + self.records * self.record_bytes

    def _encode(self, rows: Tensor) -> Tensor:
        encoded = self.base._encode(rows)
        lost = self._in_parts(rows - self.base._decode(encoded))
        encoded = encoded.view(-1, self._base_bytes)
        error = torch.linalg.vector_norm(lost, dim=-1, dtype=torch.float64).square()
        usual = error.median(1, keepdim=True).values
        error = error.masked_fill(error <= _SIGMAS**2 * usual, 0).view(len(encoded), -1)
        worst, places = error.topk(self.records, dim=1)
        lost = lost.view(len(encoded), -1, self.width).take_along_dim(places[..., None], 1)
        exponents = torch.frexp(divided(lost.abs().amax(-1), _LARGEST)).exponent.clamp(
            1 - _BIAS, _BIAS
        )
        codes = (lost / _power(exponents)[..., None]).round().clamp(-_LARGEST, _LARGEST) + 8
        unused = worst == 0
        places = places.masked_fill(unused, 0)
        exponents = (exponents + _BIAS).masked_fill(unused, 0)
        codes = codes.masked_fill(unused[..., None], 8)
        at = [places >> 8 * byte & 255 for byte in range(self._place_bytes)]
        heads = torch.stack([*at, exponents], dim=-1).to(torch.uint8)
        return joined(encoded, torch.cat((heads, nibbles(codes)), dim=-1))

    def _decode(self, data: Tensor) -> Tensor:
        encoded, records = data.split([self._base_bytes, self.records * self.record_bytes], dim=1)
        rows = self.base._decode(encoded.reshape(-1, self.base.unit_bytes))
        [records] = split_parts(records, [(torch.uint8, (self.records, self.record_bytes))])
        *at, exponents = records[..., : self._place_bytes + 1].long().unbind(-1)
        places = sum((part << 8 * byte for byte, part in enumerate(at)), torch.zeros_like(at[0]))
        codes = from_nibbles(records[..., self._place_bytes + 1 :]).float() - 8
        lost = codes * _power(exponents - _BIAS)[..., None]
        lost = lost.masked_fill((exponents == 0)[..., None], 0)
        places = places.masked_fill(exponents == 0, 0)
        added = self._in_parts(rows)
        flat = added.view(len(data), -1, self.width)
        flat.scatter_add_(1, places[..., None].expand_as(lost), lost)
        return flat.view_as(added).flatten(-2)[..., : self.dim]

    @property
    def _base_bytes(self) -> int:
        return self.pages * self.base.unit_bytes

    @property
    def _place_bytes(self) -> int:
        last = self.pages * PAGE_TOKENS * self.heads * self.parts - 1
        return -(-last.bit_length() // 8)

    def _in_parts(self, rows: Tensor) -> Tensor:
        """[pages, 16, heads, parts, width] of rows [pages, 16, heads, dim], filled with zeros."""
        filled = torch.nn.functional.pad(rows, (0, self.parts * self.width - self.dim))
        return filled.unflatten(-1, (self.parts, self.width)).contiguous()


def _power(exponents: Tensor) -> Tensor:
    """2 to the power of `exponents`, f32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
