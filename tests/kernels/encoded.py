"""Random weights in every encoding, and what they are as numbers, worked out in float64."""

import torch

from hmt.contracts.encoding import Activations, Encoding, Packing, WeightTensor
from hmt.kernels import reference
from hmt.quant import Format, empty_weight, pack_codes, pack_groups

FLOATS = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
}
TILE = (32, 48)


def random_weight(
    encoding: Encoding,
    rows: int,
    columns: int,
    *,
    group: int = 32,
    activations: Activations = Activations.FLOAT,
    seed: int = 0,
) -> WeightTensor:
    """A weight whose codes take all values and whose scales differ by orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, columns)

    def scales(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=random) * 10 ** torch.randint(
            -3, 2, sizes, generator=random
        )

    if encoding in FLOATS:
        return WeightTensor(
            encoding, shape, torch.randn(shape, generator=random).to(FLOATS[encoding])
        )
    if encoding is Encoding.FP8_BLOCK:
        codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # no NaN
        tiles = scales(-(-rows // TILE[0]), -(-columns // TILE[1]))
        return WeightTensor(encoding, shape, codes.view(torch.float8_e4m3fn), tiles, tile=TILE)
    if encoding in (Encoding.INT8_CHANNEL, Encoding.INT8_GROUP):
        codes = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        if encoding is Encoding.INT8_CHANNEL:
            return WeightTensor(encoding, shape, codes, scales(rows), activations=activations)
        groups = scales(rows, columns // group)
        return WeightTensor(encoding, shape, codes, groups, group, activations=activations)
    if encoding.packing is Packing.BLOCKS:
        return _random_blocks(encoding, shape, activations, random)
    group = {Encoding.NVFP4: 16, Encoding.MXFP4: 32}.get(encoding, group)
    form = Format(encoding, group, activations=activations)
    w = empty_weight(form, shape)
    w.data.copy_(pack_codes(torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)))
    groups = scales(rows, columns // group)
    if encoding is Encoding.MXFP4:
        groups = torch.randint(120, 134, groups.shape, generator=random, dtype=torch.uint8)
    elif encoding is Encoding.INT4_GROUP:
        groups = groups * (torch.rand(1, generator=random) - 0.5).sign()
    w.scales.copy_(pack_groups(groups))
    if w.factor is not None:
        w.factor.fill_(0.37)
    return w


# Where blocks have f16 scales, in words.
_HALVES = {
    Encoding.Q5_1: (0, 1),
    Encoding.Q2_K: (40, 41),
    Encoding.Q4_K: (0, 1),
    Encoding.Q5_K: (0, 1),
    Encoding.IQ4_XS: (0,),
}


def _random_blocks(
    encoding: Encoding, shape: tuple[int, int], activations: Activations, random: torch.Generator
) -> WeightTensor:
    """Any bytes, with scales that are numbers."""
    w = empty_weight(Format(encoding, activations=activations), shape)
    w.data.random_(generator=random)
    scales = torch.rand((*w.data.shape[:2], 16), generator=random) * 0.02 - 0.004
    if w.scales is not None:
        w.scales.copy_(scales)
    for half in _HALVES.get(encoding, ()):
        halves = w.data.view(torch.float16)[:, :, half // 2, :, half % 2]
        halves.copy_(scales.neg() if half % 2 else scales)
    if encoding is Encoding.IQ1_M:  # its scale's bits are spread; the highest ones make it small
        last = w.data[:, :, 13, :, 3]
        last.copy_((last & 0x8F) | 0x10)
    return w


def numbers(w: WeightTensor) -> torch.Tensor:
    """Every number of `w` in float64, by the definition of its encoding."""
    if w.encoding.packing is Packing.BLOCKS:  # tests/quant/test_gguf_blocks.py has ggml's own
        return reference.dequantize(w, torch.float32).double()
    if w.scales is None:
        return w.data.double()
    rows, columns = w.shape
    if w.encoding.packing is Packing.PANELS:
        return _panel_numbers(w)
    scales = w.scales.double()
    if w.encoding is Encoding.INT8_GROUP:
        return w.data.double() * scales.repeat_interleave(w.group_size, 1)
    if w.encoding is Encoding.FP8_BLOCK:
        high = scales.repeat_interleave(w.tile[0], 0)[:rows]
        return w.data.double() * high.repeat_interleave(w.tile[1], 1)[:, :columns]
    return w.data.double() * scales[:, None]


def _panel_numbers(w: WeightTensor) -> torch.Tensor:
    """By the layout's definition, number by number."""
    rows, columns = w.shape
    data, out = w.data.tolist(), torch.empty(rows, columns, dtype=torch.float64)
    if w.encoding is Encoding.MXFP4:
        scales = torch.exp2(w.scales.double() - 127)
    else:
        # The scale is the product rounded to f32.
        scales = (w.scales.float() * (1.0 if w.factor is None else w.factor)).double()
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for row in range(rows):
        panel, lane = divmod(row, 16)
        for column in range(columns):
            block, at = divmod(column, 32)
            pair = data[panel][block][at % 16 // 4][lane][at % 4]
            code = pair & 15 if at < 16 else pair >> 4
            out[row, column] = code - 8 if w.encoding is Encoding.INT4_GROUP else e2m1[code]
        groups = torch.arange(columns) // w.group_size
        out[row] *= scales[panel, groups, lane]
    return out
