"""How numbers are stored (encoding), how codes lie in memory (packing), and one parameter."""

import enum
from dataclasses import dataclass, field
from typing import Any

import torch


class Encoding(enum.StrEnum):
    """How the numbers of a weight are stored.  Which kernel computes on them is another choice."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"  # float8 e4m3, one f32 scale per tile (DeepSeek: 128 x 128)
    INT8_CHANNEL = "int8"  # one f32 scale per output row
    INT8_GROUP = "int8-group"  # one f32 scale per `group_size` inputs of a row
    INT4_GROUP = "int4"  # one scale per `group_size` inputs of a row
    NVFP4 = "nvfp4"  # e2m1, one e4m3 scale per 16 inputs, one f32 factor for all
    MXFP4 = "mxfp4"  # e2m1, one power of two per 32 inputs (OCP MX 1.0)

    @property
    def is_float(self) -> bool:
        """True where `data` holds the numbers themselves, without scales."""
        return self in (Encoding.F32, Encoding.F16, Encoding.BF16)

    @property
    def packing(self) -> "Packing":
        """How codes of this encoding lie in memory."""
        four_bits = self in (Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.MXFP4)
        return Packing.PANELS if four_bits else Packing.ROWS


class Packing(enum.StrEnum):
    """How codes lie in memory.

    ROWS     row-major, as checkpoints publish them, so that they are read straight into place
    PANELS   4-bit codes of 16 rows together, in blocks of 32 inputs, so that one register holds
             the same inputs of 16 rows: uint8 [ceil(out / 16), in / 32, 4, 16, 4].  Byte
             (p, b, j, r, i) has, for row 16 p + r, the code of input 32 b + 4 j + i in its low
             nibble and of input 32 b + 16 + 4 j + i in its high nibble.  Scales, zeros and minima
             are [ceil(out / 16), in / group_size, 16].  Rows that do not exist hold zeros.

    Weights are packed once, when they are converted; the packed form is what is kept and spilled.
    """

    ROWS = "rows"
    PANELS = "panels"


PANEL_ROWS = 16
PANEL_BLOCK = 32  # inputs

# Of everything that decides what the bytes of a converted weight are: packings, codes, scales, and
# how they are rounded.  Packs say which version they hold; raise it when any of that changes.
PACKING_VERSION = 1


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
             INT8_*        int8 [out, in]; the number is code * scale, + minimum where there are
                           minima
             INT4_GROUP    PANELS; the number is (code - 8) * scale, (code - zero) * scale where
                           there are zeros, code * scale + minimum where there are minima
             NVFP4, MXFP4  PANELS; codes of e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6, then the negatives
    scales   FP8_BLOCK     f32 [ceil(out / tile[0]), ceil(in / tile[1])]
             INT8_CHANNEL  f32 [out]
             INT8_GROUP    f32 [out, in / group_size]
             INT4_GROUP    f32, f16 or bf16, in panels
             NVFP4         float8_e4m3fn in panels, group_size 16
             MXFP4         uint8 in panels, group_size 32; e stands for 2^(e - 127)
             else None
    zeros    of INT4_GROUP, or None: uint8 in panels
    minima   of INT4_GROUP, or None: in the dtype of the scales, in panels
             of INT8_GROUP, or None: f32 [out, in / group_size]
    factor   of NVFP4: f32 [1], what every scale is multiplied with
    kernel_cache   what kernels have made of the views, for the next call; theirs alone: see
             kernels/weight_cache.py
    """

    encoding: Encoding
    shape: tuple[int, ...]
    data: torch.Tensor
    scales: torch.Tensor | None = None
    group_size: int = 0
    tile: tuple[int, int] = (0, 0)
    activations: Activations = Activations.FLOAT
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    kernel_cache: dict[object, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and what goes with them, without padding."""
        parts = (self.data, self.scales, self.zeros, self.minima, self.factor)
        return sum(part.nbytes for part in parts if part is not None)
