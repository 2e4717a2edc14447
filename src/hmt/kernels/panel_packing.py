"""Codes of 4 bits brought into panels (Packing.PANELS), when weights are converted or unpacked."""

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.encoding import PANEL_BLOCK, PANEL_ROWS
from hmt.kernels.cpu import extension
from hmt.kernels.reference import packing


def pack_codes(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [rows, columns], in panels: see Packing.PANELS."""
    return _pack(codes, codes.shape[1], paired=False)


def pack_pairs(pairs: Tensor) -> Tensor:
    """The same of codes two in a byte, the low nibble first: uint8 [rows, columns / 2]."""
    return _pack(pairs, 2 * pairs.shape[1], paired=True)


def pack_awq(words: Tensor, first: int, rows: int, out: Tensor) -> bool:
    """AutoAWQ's words int32 [columns, outputs / 8], of which `rows` outputs from `first` on.

    out  uint8 [ceil(rows / 16), columns / 32, 4, 16, 4]: their panels, see Packing.PANELS

    False, and nothing done, where there is no extension, or it is not for such tensors.
    """
    native = extension.load_for(words, out)
    columns, width = words.shape
    if native is None or first % 8 or columns % PANEL_BLOCK:
        return False
    address = words.data_ptr() + first // 8 * words.element_size()
    native.pack_awq(address, rows, columns, width, out.data_ptr(), torch.get_num_threads())
    return True


def _pack(codes: Tensor, columns: int, *, paired: bool) -> Tensor:
    if codes.stride(1) != 1:
        codes = codes.contiguous()
    native = extension.load_for(codes[:1])  # rows may lie apart
    assert codes.dtype is torch.uint8 and columns % PANEL_BLOCK == 0
    if native is None:
        if paired:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        return packing.pack_codes(codes)
    rows = codes.shape[0]
    panels = torch.empty(
        (round_up(rows, PANEL_ROWS) // PANEL_ROWS, columns // PANEL_BLOCK, 4, PANEL_ROWS, 4),
        dtype=torch.uint8,
    )
    native.pack_panels(codes.data_ptr(), rows, columns, codes.stride(0), paired, panels.data_ptr())
    return panels
