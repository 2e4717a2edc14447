"""2:4 structured sparsity: of four numbers the two that are furthest from 0 are kept."""

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.ops import PageEncoding
from hmt.kernels.reference import encode_rows
from hmt.kvcache.codecs.interface import Codec, from_nibbles, joined, nibbles, split_parts


class Sparse24(Codec):
    """2:4 sparsity along the numbers of a row (arXiv 2104.08378); among equals the first are kept.

    page   kept bf16 [16, heads, dim / 2], in their order; places [16, heads, dim / 4] of four bits
           each: two indices of two bits, the lower one in the low half.  `dim` counts as the next
           multiple of 8, filled with zeros.
    """

    @property
    @override
    def unit_bytes(self) -> int:
        return PAGE_TOKENS * self.heads * (self._value_bytes + self._filled // 8)

    def _encode(self, rows: Tensor) -> Tensor:
        fours = torch.nn.functional.pad(rows, (0, self._filled - self.dim)).unflatten(-1, (-1, 4))
        order = fours.abs().argsort(dim=-1, descending=True, stable=True)
        places = order[..., :2].sort(-1).values
        kept = fours.gather(-1, places).flatten(-2)
        return joined(*self._values(kept), nibbles(places[..., 0] | places[..., 1] << 2))

    def _decode(self, data: Tensor) -> Tensor:
        shape = PAGE_TOKENS, self.heads
        *values, packed = split_parts(
            data, [*self._value_parts(), (torch.uint8, (*shape, self._filled // 8))]
        )
        kept = self._kept(values).unflatten(-1, (-1, 2))
        codes = from_nibbles(packed).long()
        places = torch.stack((codes & 3, codes >> 2), dim=-1)
        fours = kept.new_zeros(*places.shape[:-1], 4)
        # Places are two different ones, but where bytes were never written.
        fours.scatter_(-1, places, kept)
        return fours.flatten(-2)[..., : self.dim]

    @property
    def _filled(self) -> int:
        return round_up(self.dim, 8)

    @property
    def _value_bytes(self) -> int:
        """What is kept of one row."""
        return self._filled

    def _values(self, kept: Tensor) -> list[Tensor]:
        return [kept.bfloat16()]

    def _value_parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(torch.bfloat16, (PAGE_TOKENS, self.heads, self._filled // 2))]

    def _kept(self, values: list[Tensor]) -> Tensor:
        [kept] = values
        return kept.float()


class Sparse24Int8(Sparse24):
    """The same with int8 codes for what is kept, and a f32 scale for each token and head."""

    @property
    def _value_bytes(self) -> int:
        return self._filled // 2 + 4

    def _values(self, kept: Tensor) -> list[Tensor]:
        return [*encode_rows(PageEncoding.INT8, kept)]

    def _value_parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        shape = PAGE_TOKENS, self.heads
        return [(torch.int8, (*shape, self._filled // 2)), (torch.float32, (*shape, 1))]

    def _kept(self, values: list[Tensor]) -> Tensor:
        codes, scales = values
        return codes * scales
