"""How numbers are stored (encoding), and one parameter as it lies in memory."""

import enum
from dataclasses import dataclass

import torch


class Encoding(enum.StrEnum):
    """How the numbers of a weight are stored.  Which kernel computes on them is another choice."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"  # float8 e4m3, one f32 scale per tile (DeepSeek: 128 x 128)
    INT8_CHANNEL = "int8"  # one f32 scale per output row
    INT4_GROUP = "int4"  # one f32 scale per `group_size` inputs of a row

    @property
    def is_float(self) -> bool:
        """True where `data` holds the numbers themselves, without scales."""
        return self in (Encoding.F32, Encoding.F16, Encoding.BF16)


class Activations(enum.StrEnum):
    """What a quantised weight is multiplied with."""

    FLOAT = "float"  # as computed: the "A16" of W4A16
    INT8_TOKEN = "int8"  # rounded to int8 with one scale per token: the "A8" of W4A8


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One parameter in one encoding.  A view: valid only while the block's lease is held.

    shape    logical shape, [out_features, in_features] for a linear weight
    data     F32/F16/BF16  [*shape] in that dtype
             FP8_BLOCK     float8_e4m3fn [out, in]
             INT8_CHANNEL  int8 [out, in]
             INT4_GROUP    uint8 [out, in / 2]; code + 8 in each nibble, low nibble = even input
    scales   FP8_BLOCK     f32 [ceil(out / tile[0]), ceil(in / tile[1])]
             INT8_CHANNEL  f32 [out]
             INT4_GROUP    f32 [out, in / group_size]
             else None
    """

    encoding: Encoding
    shape: tuple[int, ...]
    data: torch.Tensor
    scales: torch.Tensor | None = None
    group_size: int = 0
    tile: tuple[int, int] = (0, 0)
    activations: Activations = Activations.FLOAT

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales, without padding."""
        scales = self.scales
        return self.data.nbytes + (0 if scales is None else scales.nbytes)
