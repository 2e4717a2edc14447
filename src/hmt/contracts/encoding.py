"""How numbers are stored (encoding), how codes lie in memory (packing), and one parameter."""

import enum
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

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
    # ggml's types, at the file's own bits: see Packing.BLOCKS.  Q4_0 and Q4_1 are INT4_GROUP.
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    IQ2_XXS = "iq2_xxs"
    IQ2_XS = "iq2_xs"
    IQ2_S = "iq2_s"
    IQ3_XXS = "iq3_xxs"
    IQ3_S = "iq3_s"
    IQ1_S = "iq1_s"
    IQ1_M = "iq1_m"
    TQ1_0 = "tq1_0"
    TQ2_0 = "tq2_0"

    @property
    def is_float(self) -> bool:
        """True where `data` holds the numbers themselves, without scales."""
        return self in (Encoding.F32, Encoding.F16, Encoding.BF16)

    @property
    def packing(self) -> "Packing":
        """How codes of this encoding lie in memory."""
        if self in BLOCK_SHAPES:
            return Packing.BLOCKS
        four_bits = self in (Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.MXFP4)
        return Packing.PANELS if four_bits else Packing.ROWS

    @property
    def panel_rows(self) -> int:
        """Rows that lie interleaved, so that a part of a weight begins at a multiple of them."""
        return 1 if self.packing is Packing.ROWS else PANEL_ROWS


class Packing(enum.StrEnum):
    """How codes lie in memory.

    ROWS     row-major, as checkpoints publish them, so that they are read straight into place
    PANELS   4-bit codes of 16 rows together, in blocks of 32 inputs, so that one register holds
             the same inputs of 16 rows: uint8 [ceil(out / 16), in / 32, 4, 16, 4].  Byte
             (p, b, j, r, i) has, for row 16 p + r, the code of input 32 b + 4 j + i in its low
             nibble and of input 32 b + 16 + 4 j + i in its high nibble.  Scales, zeros and minima
             are [ceil(out / 16), in / group_size, 16].  Rows that do not exist hold zeros.
    BLOCKS   ggml's blocks of 16 rows together, as they are in a file, transposed by 32-bit words:
             uint8 [ceil(out / 16), in / numbers, words, 16, 4].  Byte (p, b, w, r, i) is byte
             4 w + i of block b of row 16 p + r.  Two bytes that would not fit into words, a scale
             in f16, were taken out of each block first: f16 [ceil(out / 16), in / numbers, 16].
             Rows that do not exist hold zeros.  Bytes per number are those of the file.

    Weights are packed once, when they are converted; the packed form is what is kept and spilled.
    """

    ROWS = "rows"
    PANELS = "panels"
    BLOCKS = "blocks"


PANEL_ROWS = 16
PANEL_BLOCK = 32  # inputs


class BlockShape(NamedTuple):
    """A block of one of ggml's types (ggml-common.h).

    numbers    inputs of a block
    nbytes     bytes of a block
    group      inputs that share an integer scale
    scale_at   at which byte the f16 is that is taken out of it (Packing.BLOCKS), or None
    """

    numbers: int
    nbytes: int
    group: int
    scale_at: int | None

    @property
    def words(self) -> int:
        """32-bit words of a block, without the f16 that is taken out."""
        return self.nbytes // 4


BLOCK_SHAPES: Final = {
    Encoding.Q5_0: BlockShape(32, 22, 32, 0),
    Encoding.Q5_1: BlockShape(32, 24, 32, None),
    Encoding.Q8_0: BlockShape(32, 34, 32, 0),
    Encoding.Q2_K: BlockShape(256, 84, 16, None),
    Encoding.Q3_K: BlockShape(256, 110, 16, 108),
    Encoding.Q4_K: BlockShape(256, 144, 32, None),
    Encoding.Q5_K: BlockShape(256, 176, 32, None),
    Encoding.Q6_K: BlockShape(256, 210, 16, 208),
    Encoding.IQ4_NL: BlockShape(32, 18, 32, 0),
    Encoding.IQ4_XS: BlockShape(256, 136, 32, None),
    Encoding.IQ2_XXS: BlockShape(256, 66, 32, 0),
    Encoding.IQ2_XS: BlockShape(256, 74, 16, 0),
    Encoding.IQ2_S: BlockShape(256, 82, 16, 0),
    Encoding.IQ3_XXS: BlockShape(256, 98, 32, 0),
    Encoding.IQ3_S: BlockShape(256, 110, 32, 0),
    Encoding.IQ1_S: BlockShape(256, 50, 32, 0),
    Encoding.IQ1_M: BlockShape(256, 56, 16, None),
    Encoding.TQ1_0: BlockShape(256, 54, 256, 52),
    Encoding.TQ2_0: BlockShape(256, 66, 256, 64),
}

# Of everything that decides what the bytes of a converted weight are: packings, codes, scales, and
# how they are rounded.  Packs say which version they hold; raise it when any of that changes.
PACKING_VERSION = 2


class Activations(enum.StrEnum):
    """What a quantised weight is multiplied with."""

    FLOAT = "float"  # as computed: the "A16" of W4A16
    INT8_TOKEN = "int8"  # rounded to int8 with one scale per token: the "A8" of W4A8
    # The same with one scale per 32 inputs of a token, for weights whose groups or blocks have as
    # many: 4-bit panels, and BLOCKS of 32 numbers.  It is what llama.cpp does for these types.
    # Kernels of a GPU multiply panels with floats, and BLOCKS as with INT8_BLOCK.
    INT8_GROUP = "int8-group"
    # The same with one scale per 256 inputs of a token (the last may be fewer); for BLOCKS only.
    # It is what llama.cpp does for K types; models with a few large activations need it.
    INT8_BLOCK = "int8-block"

    @property
    def are_integers(self) -> bool:
        """True where activations are rounded to int8."""
        return self is not Activations.FLOAT


ACTIVATION_GROUP = 32  # inputs that share a scale with INT8_GROUP
ACTIVATION_BLOCK = 256  # the same with INT8_BLOCK


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
             ggml's types  BLOCKS
             NVFP4, MXFP4  PANELS; codes of e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6, then the negatives
    scales   FP8_BLOCK     f32 [ceil(out / tile[0]), ceil(in / tile[1])]
             INT8_CHANNEL  f32 [out]
             INT8_GROUP    f32 [out, in / group_size]
             INT4_GROUP    f32, f16 or bf16, in panels
             NVFP4         float8_e4m3fn in panels, group_size 16
             MXFP4         uint8 in panels, group_size 32; e stands for 2^(e - 127)
             ggml's types  f16, what was taken out of blocks; None where nothing was
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
