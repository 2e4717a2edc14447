"""Keys and values in 8 or 4 bits, with scales by token, by channel, or given beforehand."""

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.ops import PageEncoding
from hmt.kernels.reference import divided, encode_rows
from hmt.kvcache.codecs.interface import Codec, from_nibbles, joined, nibbles, split_parts

_GROUP = 32  # numbers that share a scale of INT4
_LARGEST = 127


class Int8PerToken(Codec):
    """A f32 scale for each token and head: the numbers of PageEncoding.INT8 ("C8-D").

    page   codes int8 [16, heads, dim], scales f32 [16, heads]
    """

    @property
    @override
    def unit_bytes(self) -> int:
        return PAGE_TOKENS * self.heads * (self.dim + 4)

    def _encode(self, rows: Tensor) -> Tensor:
        return joined(*encode_rows(PageEncoding.INT8, rows))

    def _decode(self, data: Tensor) -> Tensor:
        shape = PAGE_TOKENS, self.heads
        parts = [(torch.int8, (*shape, self.dim)), (torch.float32, (*shape, 1))]
        codes, scales = split_parts(data, parts)
        return codes * scales


class Int8PerChannel(Codec):
    """A bf16 scale for each head and channel of a page.

    Some channels of keys are large in all tokens (KIVI, arXiv 2402.02750).

    page   codes int8 [16, heads, dim], scales bf16 [heads, dim]
    """

    @property
    @override
    def unit_bytes(self) -> int:
        return (PAGE_TOKENS + 2) * self.heads * self.dim

    def _encode(self, rows: Tensor) -> Tensor:
        scales = divided(rows.abs().amax(1), _LARGEST).bfloat16()
        return joined(_codes(rows, scales[:, None].float()), scales)

    def _decode(self, data: Tensor) -> Tensor:
        shape = self.heads, self.dim
        codes, scales = split_parts(
            data, [(torch.int8, (PAGE_TOKENS, *shape)), (torch.bfloat16, (1, *shape))]
        )
        return codes * scales.float()


class Int8Static(Codec):
    """A scale for each head and channel that was found beforehand ("C8-S"); pages hold codes only.

    What lies outside of the scale's range is cut off.

    page     codes int8 [16, heads, dim]
    scales   f32 [heads, dim], none 0: see `static_scales`
    """

    def __init__(self, heads: int, dim: int, scales: Tensor) -> None:
        super().__init__(heads, dim)
        assert scales.shape == (heads, dim) and bool((scales > 0).all())
        self.scales = scales.float()

    @property
    @override
    def unit_bytes(self) -> int:
        return PAGE_TOKENS * self.heads * self.dim

    def _encode(self, rows: Tensor) -> Tensor:
        return joined(_codes(rows, self.scales.to(rows.device)))

    def _decode(self, data: Tensor) -> Tensor:
        shape = PAGE_TOKENS, self.heads, self.dim
        [codes] = split_parts(data, [(torch.int8, shape)])
        return codes * self.scales.to(data.device)


def static_scales(largest: Tensor) -> Tensor:
    """Scales f32 [heads, dim] for magnitudes up to `largest` [heads, dim].

    A channel that was always 0 gets the largest scale of its head; 1 where the whole head was 0.
    """
    scales = divided(largest.float(), _LARGEST)
    instead = scales.amax(-1, keepdim=True)
    instead = instead.masked_fill(instead == 0, 1)
    return torch.where(scales == 0, instead, scales)


class Int4(Codec):
    """A bf16 scale for each 32 numbers of a row: the numbers of PageEncoding.INT4.

    page   codes [16, heads, dim], two in a byte; scales bf16 [16, heads, groups]
    """

    @property
    @override
    def unit_bytes(self) -> int:
        return PAGE_TOKENS * self.heads * (self._even // 2 + self._groups * 2)

    def _encode(self, rows: Tensor) -> Tensor:
        codes, scales = encode_rows(PageEncoding.INT4, rows)
        return joined(nibbles(_padded(codes, self._even)), scales)

    def _decode(self, data: Tensor) -> Tensor:
        shape = PAGE_TOKENS, self.heads
        packed, scales = split_parts(
            data,
            [(torch.uint8, (*shape, self._even // 2)), (torch.bfloat16, (*shape, self._groups))],
        )
        numbers = from_nibbles(packed)[..., : self.dim].float() - 8
        return numbers * scales.float().repeat_interleave(_GROUP, -1)[..., : self.dim]

    @property
    def _even(self) -> int:
        return round_up(self.dim, 2)

    @property
    def _groups(self) -> int:
        return -(-self.dim // _GROUP)


def _codes(rows: Tensor, scales: Tensor) -> Tensor:
    """rows / scales in int8, 0 where a scale is."""
    divisors = scales.masked_fill(scales == 0, 1)
    codes = (rows / divisors).round().clamp(-_LARGEST, _LARGEST)
    return codes.masked_fill(scales == 0, 0).to(torch.int8)


def _padded(codes: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, dim - codes.shape[-1]))
