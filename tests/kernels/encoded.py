"""Random weights in every encoding, and what they are as numbers, worked out in float64."""

import torch

from hmt.contracts.encoding import Activations, Encoding, WeightTensor

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
    if encoding is Encoding.INT8_CHANNEL:
        codes = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        return WeightTensor(encoding, shape, codes, scales(rows), activations=activations)
    pairs = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    groups = scales(rows, columns // group) * (torch.rand(1, generator=random) - 0.5).sign()
    return WeightTensor(encoding, shape, pairs, groups, group, activations=activations)


def numbers(w: WeightTensor) -> torch.Tensor:
    """Every number of `w` in float64, by the definition of its encoding."""
    if w.scales is None:
        return w.data.double()
    rows, columns = w.shape
    scales = w.scales.double()
    if w.encoding is Encoding.INT4_GROUP:
        codes = torch.empty(rows, columns, dtype=torch.float64)
        codes[:, 0::2] = (w.data & 15).double() - 8
        codes[:, 1::2] = (w.data >> 4).double() - 8
        return codes * scales.repeat_interleave(w.group_size, 1)
    if w.encoding is Encoding.FP8_BLOCK:
        high = scales.repeat_interleave(w.tile[0], 0)[:rows]
        return w.data.double() * high.repeat_interleave(w.tile[1], 1)[:, :columns]
    return w.data.double() * scales[:, None]
