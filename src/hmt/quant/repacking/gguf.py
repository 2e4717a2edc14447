"""Blocks of GGUF files, in memory at the file's own bits.

Layouts: ggml's ggml-common.h.  A row is a sequence of blocks of 32 or 256 inputs, each with its
codes and scales.  Nothing is rounded and nothing is computed: bytes change their places, so that a
register holds the same inputs of 16 rows (Packing.PANELS and Packing.BLOCKS).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.base.units import round_up
from hmt.contracts.encoding import BLOCK_SHAPES, PANEL_ROWS, Encoding, WeightTensor
from hmt.kernels import gguf_packing
from hmt.kernels.reference.packing import pack_blocks
from hmt.quant.packed import Format, pack_groups, row_slice
from hmt.quant.repacking.bits import DTYPES, as_tensor
from hmt.quant.repacking.dequantized import dequantized
from hmt.quant.repacking.floats import Floats
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_order import grouped_by_heads, turn_back, untiled

# Rows are unpacked so many bytes at a time: what is made of them on the way stays in the cache.
_CHUNK_BYTES = 1 << 18

# Types whose blocks are codes of 4 bits and f16 or e8m0 scales lie in panels as HMT's own do.
_PANELS = {
    "Q4_0": Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float16),
    "Q4_1": Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float16, minima=True),
    "MXFP4": Format(Encoding.MXFP4, 32),
}
_FORMATS = _PANELS | {encoding.name: Format(encoding) for encoding in BLOCK_SHAPES}
_PANEL_BYTES = {"Q4_0": 18, "Q4_1": 20, "MXFP4": 17}  # of a block of 32


@dataclass(frozen=True, slots=True)
class Gguf(WeightImporter):
    """One of ggml's types.

    turned   rows of a head, where they lie in another order: see turn_back; else 0

    Part: blocks [rows, bytes of a row].
    """

    kind: str
    turned: int = 0

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        size = _numbers(self.kind)
        if len(shape) != 2 or shape[1] % size:
            raise CheckpointError(
                f"its shape is {list(shape)}, and {self.kind} has rows of blocks of {size} numbers"
            )
        return _FORMATS[self.kind]

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows = target.shape[0]
        raw = parts["blocks"].view(rows, -1)
        if gguf_packing.pack_rows(self.kind, raw, target, self.turned):
            return
        unit = lcm(PANEL_ROWS, self.turned or 1)  # whole heads, and whole panels
        step = max(1, _CHUNK_BYTES // raw.shape[1] // unit) * unit
        for start in range(0, rows, step):
            end = min(start + step, rows)
            some = turn_back(raw[start:end], self.turned) if self.turned else raw[start:end]
            self._write(some, row_slice(target, start, end))

    def _write(self, raw: Tensor, target: WeightTensor) -> None:
        if self.kind not in _PANELS:
            pack_blocks(target.encoding, raw, target.data, target.scales)
            return
        blocks = raw.reshape(-1, _PANEL_BYTES[self.kind])
        codes = blocks[:, -16:].reshape(len(raw), -1)
        floats = torch.uint8 if self.kind == "MXFP4" else torch.float16
        assert target.scales is not None
        scales = (
            blocks[:, :-16].contiguous().view(floats).view(len(raw), target.scales.shape[1], -1)
        )
        target.data.copy_(_panels(codes))
        target.scales.copy_(pack_groups(scales[..., 0]))
        if target.minima is not None:
            target.minima.copy_(pack_groups(scales[..., 1]))


@dataclass(frozen=True, slots=True)
class GgufLatent(WeightImporter):
    """kv_b_proj of latent attention, of whose heads keys and values are separate tensors.

    Keys are transposed, so that their groups run along what are rows here: no format has that, and
    all becomes f32.

    keys, values   their types

    Parts: keys [heads, rank, nope_dim], values [heads, value_dim, rank], whole.
    """

    keys: str
    values: str
    heads: int
    nope_dim: int
    value_dim: int
    rank: int

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding.F32)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        keys = _dequantized(parts["keys"], self.keys, self.heads * self.rank, self.nope_dim)
        values = _dequantized(parts["values"], self.values, self.heads * self.value_dim, self.rank)
        both = (
            keys.view(self.heads, self.rank, self.nope_dim).transpose(1, 2),
            values.view(self.heads, self.value_dim, self.rank),
        )
        rows = torch.cat(both, dim=1).view(-1, self.rank)
        target.data.copy_(rows[first : first + target.shape[0]])


@dataclass(frozen=True, slots=True)
class GgufReordered(WeightImporter):
    """A tensor whose rows belong in another order, or whose rows are columns here.

    kind      its type
    rows      of it
    columns   0: it is a vector
    groups    heads of keys, in whose order queries, keys and values belong together, where they
              were published one after the other; 0: it is to be transposed, and becomes f32
    width     rows of a head

    Part: blocks [rows, bytes of a row], whole.
    """

    kind: str
    rows: int
    columns: int
    groups: int
    width: int = 0

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if not self.groups:
            return Format(Encoding.F32)
        return _importer(self.kind).format(shape)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        raw = parts["blocks"]
        end = first + target.shape[0]
        if not self.groups:
            numbers = _dequantized(raw, self.kind, self.rows, self.columns)
            target.data.copy_(numbers.T[first:end])
            return
        ordered = grouped_by_heads(raw.reshape(self.rows, -1), self.groups, self.width)
        own = ordered[first:end].contiguous()
        _importer(self.kind).unpack({"data": own, "blocks": own}, target, first)


@dataclass(frozen=True, slots=True)
class GgufTiled(WeightImporter):
    """A tensor whose rows belong to heads of values that lie in another order: see untiled.

    kind     its type
    rows     of it
    decay    see Floats

    Part: blocks [rows, bytes of a row], whole.
    """

    kind: str
    rows: int
    before: int
    groups: int
    width: int
    decay: bool = False

    @property
    def _ordered(self) -> Gguf | Floats:
        """What brings them where they lie in order."""
        return Floats(self.kind, decay=True) if self.decay else _importer(self.kind)

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if (self.rows - self.before) % (self.groups * self.width):
            raise CheckpointError(
                f"{self.rows} rows, of which {self.before} are of queries and keys, are no heads "
                f"of {self.width} for each of {self.groups} heads of keys"
            )
        return self._ordered.format(shape)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows = parts["blocks"].reshape(self.rows, -1)
        ordered = untiled(rows, self.before, self.groups, self.width)
        own = ordered[first : first + target.shape[0]].contiguous()
        self._ordered.unpack({"data": own, "blocks": own}, target, first)


@dataclass(frozen=True, slots=True)
class GgufFrames(WeightImporter):
    """A convolution's kernel [out, in, frames, height, width], of which each frame is a tensor.

    kind     their type: a float
    frames   how many

    Parts: "0", "1", ... [out, in, height, width], whole.
    """

    kind: str
    frames: int

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if len(shape) != 5 or shape[2] != self.frames:
            raise CheckpointError(
                f"its shape is {list(shape)}, and it is published as {self.frames} frames"
            )
        return Format(Encoding(self.kind.lower()))

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, channels, _, height, width = target.shape
        for frame in range(self.frames):
            numbers = as_tensor(parts[str(frame)], DTYPES[self.kind], -1, channels, height, width)
            target.data[:, :, frame].copy_(numbers[first : first + rows])


def gguf_format(kind: str) -> Format:
    """How one of ggml's types lies in memory; Encoding names the floats."""
    return _FORMATS.get(kind) or Format(Encoding[kind])


def _numbers(kind: str) -> int:
    """Numbers of a block."""
    return 32 if kind in _PANELS else BLOCK_SHAPES[Encoding[kind]].numbers


def _importer(kind: str) -> Gguf | Floats:
    """Of one of ggml's types, floats included; the part is "blocks" of one, "data" of the other."""
    return Gguf(kind) if kind in _FORMATS else Floats(kind)


def _dequantized(raw: Tensor, kind: str, rows: int, columns: int) -> Tensor:
    """f32 [rows, columns] of any type."""
    return dequantized(_importer(kind), (rows, columns), {"data": raw, "blocks": raw})


def _panels(pairs: Tensor) -> Tensor:
    """Codes in pairs uint8 [rows, in / 2] in panels; four bytes of a row stay together."""
    rows, width = pairs.shape
    if rows % PANEL_ROWS:
        padded = pairs.new_zeros(round_up(rows, PANEL_ROWS), width)
        padded[:rows] = pairs
        pairs = padded
    words = pairs.contiguous().view(torch.int32).view(-1, PANEL_ROWS, width // 16, 4)
    panels = words.permute(0, 2, 3, 1).contiguous()
    return panels.view(torch.uint8).view(*panels.shape, 4)
