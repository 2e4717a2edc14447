"""Four-bit floats (e2m1) with a scale per 16 or 32 inputs: NVFP4 and MXFP4 as published.

NVFP4   ModelOpt (`weight`, `weight_scale`, `weight_scale_2`) and compressed-tensors
        (`weight_packed`, `weight_scale`, `weight_global_scale`)
MXFP4   gpt-oss (`NAME_blocks`, `NAME_scales`) and compressed-tensors
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import PANEL_BLOCK, Encoding, WeightTensor
from hmt.kernels.panel_packing import pack_pairs
from hmt.kernels.reference.packing import E2M1
from hmt.quant.packed import Format, pack_groups
from hmt.quant.repacking.bits import as_tensor, unpack_nibbles
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks

_NVFP4_GROUP = 16
_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class NVFP4(WeightImporter):
    """Pairs of codes, an e4m3 scale per 16 inputs, and one f32 for the whole weight.

    divides   the last one divides the scales (compressed-tensors) instead of multiplying them

    Parts: codes uint8 [rows, in / 2], scales e4m3 [rows, in / 16], factor f32 [1].  Where the
    factor divides, it is its reciprocal that is kept, as vLLM does.  A scale times it can differ
    by one unit in f32's last place from what compressed-tensors' own division gives.
    """

    divides: bool

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if shape[1] % PANEL_BLOCK:
            return Format(Encoding.F32)
        return Format(Encoding.NVFP4, _NVFP4_GROUP)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, columns = target.shape
        groups = columns // _NVFP4_GROUP
        pairs = parts["codes"].view(rows, columns // 2)
        scales = as_tensor(parts["scales"], torch.float8_e4m3fn, rows, groups)
        factor = as_tensor(parts["factor"], torch.float32, 1)
        if self.divides:
            factor = factor.reciprocal()
        if target.factor is not None:
            target.factor.copy_(factor)
        for some, piece in row_chunks(target):
            if piece.scales is None:
                codes = unpack_nibbles(pairs[some])
                _fill_floats(piece.data, codes, scales[some].float() * factor)
                continue
            piece.data.copy_(pack_pairs(pairs[some]))
            piece.scales.view(torch.uint8).copy_(pack_groups(scales[some].view(torch.uint8)))


@dataclass(frozen=True, slots=True)
class MXFP4(WeightImporter):
    """Pairs of codes and a power of two per 32 inputs (OCP MX 1.0).

    interleaved   published rows of this many weights are interleaved: 2 for gpt-oss, whose
                  gate and up projections share a tensor
    turn          which of them this one is

    Parts: codes uint8 [interleaved * rows, in / 2], scales uint8 [interleaved * rows, in / 32].
    """

    interleaved: int = 1
    turn: int = 0

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding.MXFP4, _MXFP4_GROUP)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, columns = target.shape
        mine = slice(self.turn, None, self.interleaved)
        codes = parts["codes"].view(rows * self.interleaved, columns // 2)[mine]
        scales = parts["scales"].view(rows * self.interleaved, columns // _MXFP4_GROUP)[mine]
        for some, piece in row_chunks(target):
            assert piece.scales is not None
            piece.data.copy_(pack_pairs(codes[some]))
            piece.scales.copy_(pack_groups(scales[some]))


def _fill_floats(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    numbers = torch.tensor(E2M1)[codes.long()].view(*scales.shape, -1)
    out.copy_((numbers * scales[..., None]).view(out.shape))
