"""Blocks of GGUF files, repacked without loss for the kernels that there are.

Layouts: ggml's ggml-common.h.  A row is a sequence of blocks of 32 or 256 inputs, each with its
codes and scales.  Numbers are the products and sums, in f32, that ggml's dequantisers compute: what
is a product there (a scale times a scale of scales) is computed here, and kept in f32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.base.units import round_up
from hmt.contracts.encoding import PANEL_ROWS, Encoding, Packing, WeightTensor
from hmt.kernels import ops
from hmt.kernels.gguf_unpack import unpack_blocks
from hmt.quant.importers.floats import Floats
from hmt.quant.importers.gguf_blocks import BLOCKS, Unpacked
from hmt.quant.importers.interface import WeightImporter
from hmt.quant.importers.row_order import turn_back
from hmt.quant.packed import Format, empty_weight, pack_groups

# Rows are unpacked so many numbers at a time: what is made of them on the way stays in the cache.
_CHUNK_NUMBERS = 1 << 18

_FORMATS = {
    "Q4_0": Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float16),
    "Q4_1": Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float16, minima=True),
    "Q5_0": Format(Encoding.INT8_GROUP, 32),
    "Q5_1": Format(Encoding.INT8_GROUP, 32, minima=True),
    "Q8_0": Format(Encoding.INT8_GROUP, 32),
    "Q2_K": Format(Encoding.INT4_GROUP, 16, scale_dtype=torch.float32, minima=True),
    "Q3_K": Format(Encoding.INT4_GROUP, 16, scale_dtype=torch.float32),
    "Q4_K": Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float32, minima=True),
    "Q5_K": Format(Encoding.INT8_GROUP, 32, minima=True),
    "Q6_K": Format(Encoding.INT8_GROUP, 16),
    "IQ4_NL": Format(Encoding.INT8_GROUP, 32),
    "IQ4_XS": Format(Encoding.INT8_GROUP, 32),
    "MXFP4": Format(Encoding.MXFP4, 32),
}


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
        size = BLOCKS[self.kind].numbers
        if len(shape) != 2 or shape[1] % size:
            raise CheckpointError(
                f"its shape is {list(shape)}, and {self.kind} has rows of blocks of {size} numbers"
            )
        return _FORMATS[self.kind]

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        blocks = BLOCKS[self.kind]
        rows, columns = target.shape
        raw = parts["blocks"].view(rows, -1)
        if unpack_blocks(self.kind, raw, target, self.turned):
            return
        unit = lcm(PANEL_ROWS, self.turned or 1)  # whole heads, and whole panels
        step = max(1, _CHUNK_NUMBERS // columns // unit) * unit
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            found = blocks.unpack(raw[some].reshape(-1, blocks.nbytes))
            _write(target, some, found, self._in_order(columns))

    def _in_order(self, columns: int) -> Callable[[Tensor], Tensor]:
        """What makes rows of numbers of many blocks, each [blocks, n]."""

        def rows_of(numbers: Tensor) -> Tensor:
            per_row = columns // BLOCKS[self.kind].numbers
            rows = numbers.reshape(-1, per_row * numbers.shape[1])
            return turn_back(rows, self.turned) if self.turned else rows

        return rows_of


@dataclass(frozen=True, slots=True)
class GgufLatent(WeightImporter):
    """kv_b_proj of latent attention, of whose heads keys and values are tensors of their own.

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
        keys = _numbers(parts["keys"], self.keys, self.heads * self.rank, self.nope_dim)
        values = _numbers(parts["values"], self.values, self.heads * self.value_dim, self.rank)
        both = (
            keys.view(self.heads, self.rank, self.nope_dim).transpose(1, 2),
            values.view(self.heads, self.value_dim, self.rank),
        )
        rows = torch.cat(both, dim=1).view(-1, self.rank)
        target.data.copy_(rows[first : first + target.shape[0]])


def _numbers(raw: Tensor, kind: str, rows: int, columns: int) -> Tensor:
    """f32 [rows, columns] of any type."""
    form = Floats(kind) if kind not in BLOCKS else Gguf(kind)
    shape = (rows, columns)
    found = empty_weight(form.format(shape), shape)
    form.unpack({"data": raw, "blocks": raw}, found, 0)
    return ops.dequantize(found, torch.float32)


def _write(
    target: WeightTensor, rows: slice, found: Unpacked, in_order: Callable[[Tensor], Tensor]
) -> None:
    assert target.scales is not None
    codes, scales = in_order(found.codes), in_order(found.scales)
    minima = None if found.minima is None else in_order(found.minima)
    assert (minima is None) is (target.minima is None)
    if target.encoding.packing is Packing.ROWS:
        target.data[rows] = codes.view(torch.int8)
        target.scales[rows] = scales
        if target.minima is not None and minima is not None:
            target.minima[rows] = minima
        return
    panels = slice(rows.start // 16, -(-rows.stop // 16))
    target.data[panels] = _panels(codes)
    target.scales[panels] = pack_groups(scales)
    if target.minima is not None and minima is not None:
        target.minima[panels] = pack_groups(minima)


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
