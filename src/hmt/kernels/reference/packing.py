"""Codes brought into panels; codes and scales taken out of them again."""

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.encoding import (
    BLOCK_SHAPES,
    PANEL_BLOCK,
    PANEL_ROWS,
    Encoding,
    Packing,
    WeightTensor,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pack_codes(codes: Tensor) -> Tensor:
    """4-bit codes 0..15, uint8 [rows, columns], in panels: see Packing.PANELS."""
    rows, columns = codes.shape
    panels = codes.new_zeros(round_up(rows, PANEL_ROWS), columns)
    panels[:rows] = codes
    split = panels.view(-1, PANEL_ROWS, columns // PANEL_BLOCK, 2, 4, 4)  # p, r, b, half, j, i
    low, high = split.permute(3, 0, 2, 4, 1, 5)  # each p, b, j, r, i
    return low | high << 4


def pack_blocks(encoding: Encoding, blocks: Tensor, data: Tensor, scales: Tensor | None) -> None:
    """Bring blocks of one of ggml's types, uint8 [rows, bytes of a row], into Packing.BLOCKS.

    data, scales   what is written, of a weight with as many rows
    """
    shape, count = BLOCK_SHAPES[encoding], data.shape[1]
    rows = blocks.new_zeros(len(data) * PANEL_ROWS, blocks.shape[1])
    rows[: len(blocks)] = blocks
    whole = rows.view(len(data), PANEL_ROWS, count, shape.nbytes)
    if shape.scale_at is not None:
        assert scales is not None
        taken = whole[..., shape.scale_at : shape.scale_at + 2].contiguous()
        scales.copy_(taken.view(torch.float16)[..., 0].transpose(1, 2))
        whole = torch.cat((whole[..., : shape.scale_at], whole[..., shape.scale_at + 2 :]), dim=-1)
    data.copy_(whole.unflatten(-1, (shape.words, 4)).permute(0, 2, 3, 1, 4))


def unpack_blocks(w: WeightTensor, rows: slice) -> Tensor:
    """Blocks of some rows of a weight in Packing.BLOCKS, as files have them: uint8 [n, bytes]."""
    shape = BLOCK_SHAPES[w.encoding]
    start, stop, _ = rows.indices(w.shape[0])
    first = start // PANEL_ROWS
    panels = slice(first, -(-stop // PANEL_ROWS))
    whole = w.data[panels].permute(0, 3, 1, 2, 4).flatten(3)  # [p, r, b, bytes]
    if shape.scale_at is not None:
        assert w.scales is not None
        taken = w.scales[panels].transpose(1, 2).contiguous()[..., None].view(torch.uint8)
        whole = torch.cat((whole[..., : shape.scale_at], taken, whole[..., shape.scale_at :]), -1)
    blocks = whole.reshape(-1, whole.shape[2], shape.nbytes)
    return blocks[start - PANEL_ROWS * first : stop - PANEL_ROWS * first].flatten(0, 1)


def unpack_codes(w: WeightTensor, rows: slice) -> Tensor:
    """4-bit codes 0..15 of some rows of a weight in panels: uint8 [rows, in]."""
    start, stop, _ = rows.indices(w.shape[0])
    first = start // 16
    pairs = w.data[first : -(-stop // 16)]  # [panels, blocks, 4, 16, 4]
    halves = torch.stack((pairs & 15, pairs >> 4))  # [2, p, b, j, r, i]
    codes = halves.permute(1, 4, 2, 0, 3, 5).reshape(-1, w.shape[1])
    return codes[start - 16 * first : stop - 16 * first]


def unpack_groups(panels: Tensor, rows: slice, height: int) -> Tensor:
    """Numbers per group of some rows of a weight with `height` rows, in panels: [rows, groups]."""
    start, stop, _ = rows.indices(height)
    first = start // 16
    values = panels[first : -(-stop // 16)].transpose(1, 2).flatten(0, 1)
    return values[start - 16 * first : stop - 16 * first]


def integer_codes(w: WeightTensor, rows: slice) -> Tensor:
    """What int8 activations are multiplied with: int8 [rows, in].

    Codes of e2m1 are doubled, which makes them integers; `integer_scales` are halved for it.
    """
    if w.encoding in (Encoding.INT8_CHANNEL, Encoding.INT8_GROUP):
        return w.data[rows]
    codes = unpack_codes(w, rows)
    if w.encoding is not Encoding.INT4_GROUP:
        table = torch.tensor(E2M1, device=codes.device).mul(2).to(torch.int8)
        return table[codes.long()]
    if w.minima is not None:
        return codes.view(torch.int8)
    if w.zeros is None:
        return codes.view(torch.int8) - 8
    zeros = unpack_groups(w.zeros, rows, w.shape[0]).view(torch.int8)
    return codes.view(torch.int8) - zeros.repeat_interleave(w.group_size, 1)


def integer_scales(w: WeightTensor, rows: slice) -> Tensor:
    """The scale of `integer_codes` for each row and group: f32 [rows, groups]."""
    assert w.scales is not None
    match w.encoding:
        case Encoding.INT8_CHANNEL:
            return w.scales[rows, None]
        case Encoding.INT8_GROUP:
            return w.scales[rows]
    scales = unpack_groups(w.scales, rows, w.shape[0])
    match w.encoding:
        case Encoding.NVFP4:
            assert w.factor is not None
            return scales.float() * w.factor * 0.5
        case Encoding.MXFP4:
            return torch.exp2(scales.float() - 127) * 0.5
        case _:
            return scales.float()


def minima(w: WeightTensor, rows: slice) -> Tensor | None:
    """f32 [rows, groups], or None."""
    if w.minima is None or w.encoding.packing is Packing.ROWS:
        return None if w.minima is None else w.minima[rows]
    return unpack_groups(w.minima, rows, w.shape[0]).float()
