"""Random weights in every encoding for tests of Triton's kernels, on the device of the test."""

from dataclasses import replace

import torch

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference.packing import pack_blocks
from hmt.quant import Format, empty_weight, pack_codes, pack_groups

FLOATS = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
}
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random_weight(
    encoding: Encoding,
    rows: int,
    columns: int,
    *,
    device: torch.device,
    group: int = 32,
    tile: tuple[int, int] = (32, 64),
    activations: Activations = Activations.FLOAT,
    scale_dtype: torch.dtype = torch.bfloat16,
    offsets: str | None = None,
    spread: bool = True,
    seed: int = 0,
) -> WeightTensor:
    """A weight whose codes take all values; scales differ by orders of magnitude if `spread`."""
    random = torch.Generator().manual_seed(seed)

    def scales(*sizes: int) -> torch.Tensor:
        values = torch.rand(sizes, generator=random) * 0.02 + 0.002
        if spread:
            values = values * 10.0 ** torch.randint(-2, 2, sizes, generator=random)
        return values

    def integers(low: int, high: int, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, sizes, generator=random, dtype=dtype)

    parts: dict[str, torch.Tensor] = {}
    if encoding in FLOATS:
        parts["data"] = torch.randn(rows, columns, generator=random).to(FLOATS[encoding])
        group = 0
    elif encoding is Encoding.FP8_BLOCK:
        codes = integers(0, 256, rows, columns, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # no NaN
        parts["data"] = codes.view(torch.float8_e4m3fn)
        parts["scales"] = scales(-(-rows // tile[0]), -(-columns // tile[1]))
        group = 0
    elif encoding in (Encoding.INT8_CHANNEL, Encoding.INT8_GROUP):
        parts["data"] = integers(-128, 128, rows, columns, dtype=torch.int8)
        group = 0 if encoding is Encoding.INT8_CHANNEL else group
        parts["scales"] = scales(rows, columns // group) if group else scales(rows)
        if offsets == "minima":
            parts["minima"] = scales(rows, columns // group).mul(-5)
    else:
        group = {Encoding.NVFP4: 16, Encoding.MXFP4: 32}.get(encoding, group)
        codes = integers(0, 16, rows, columns, dtype=torch.uint8)
        parts["data"] = pack_codes(codes).contiguous()
        size = (rows, columns // group)
        if encoding is Encoding.MXFP4:
            parts["scales"] = pack_groups(integers(112, 126, *size, dtype=torch.uint8))
        elif encoding is Encoding.NVFP4:
            parts["scales"] = pack_groups(scales(*size).mul(100).to(torch.float8_e4m3fn))
            parts["factor"] = torch.tensor([0.37])
        else:
            signs = torch.rand(size, generator=random).sub(0.3).sign()
            parts["scales"] = pack_groups(scales(*size).mul(signs).to(scale_dtype))
        if offsets == "zeros":
            parts["zeros"] = pack_groups(integers(0, 16, *size, dtype=torch.uint8))
        if offsets == "minima":
            parts["minima"] = pack_groups(scales(*size).mul(-5).to(scale_dtype))
    return WeightTensor(
        encoding,
        (rows, columns),
        group_size=group,
        tile=tile if encoding is Encoding.FP8_BLOCK else (0, 0),
        activations=activations,
        **{name: part.to(device) for name, part in parts.items()},
    )


# Where blocks have their f16 numbers; at byte 0 where nothing is said.
_HALVES = {
    Encoding.Q2_K: (80, 82),
    Encoding.Q3_K: (108,),
    Encoding.Q6_K: (208,),
    Encoding.TQ1_0: (52,),
    Encoding.TQ2_0: (64,),
    Encoding.IQ1_M: (),
    **dict.fromkeys((Encoding.Q5_1, Encoding.Q4_K, Encoding.Q5_K), (0, 2)),
}


def random_blocks(
    encoding: Encoding,
    rows: int,
    columns: int,
    *,
    device: torch.device,
    activations: Activations = Activations.INT8_BLOCK,
    seed: int = 0,
) -> WeightTensor:
    """A weight of one of ggml's types: any bytes, and scales of any sign."""
    random = torch.Generator().manual_seed(seed)
    shape = BLOCK_SHAPES[encoding]
    count = rows * columns // shape.numbers
    raw = torch.randint(0, 256, (count, shape.nbytes), generator=random, dtype=torch.uint8)
    halves = torch.randn(count, 2, generator=random).mul(0.02).to(torch.float16)
    for index, at in enumerate(_HALVES.get(encoding, (0,))):
        raw[:, at : at + 2] = halves[:, index : index + 1].contiguous().view(torch.uint8)
    if encoding is Encoding.IQ1_M:  # four bits of it in each of four words
        bits = halves[:, 0].view(torch.uint16).int()
        for word in range(4):
            high = raw[:, 49 + 2 * word]
            raw[:, 49 + 2 * word] = high & 15 | ((bits >> 4 * word & 15) << 4).to(torch.uint8)
    w = empty_weight(Format(encoding, activations=activations), (rows, columns))
    pack_blocks(encoding, raw.view(rows, -1), w.data, w.scales)
    parts = {"data": w.data.to(device), "scales": None if w.scales is None else w.scales.to(device)}
    return replace(w, **parts)


def numbers(w: WeightTensor) -> torch.Tensor:
    """What `w` stands for, in float64."""
    return reference.dequantize(w, torch.float32).double()


def assert_is_product(
    found: torch.Tensor, x: torch.Tensor, w: WeightTensor, bias: torch.Tensor | None = None
) -> None:
    """`found` is x times w, but for rounding: of weights, of sums, and of the result."""
    values = x.double()
    if w.activations is Activations.INT8_TOKEN:
        # On the CPU: CUDA multiplies by 1 / 127 where the reference divides.
        codes, scales = reference.quantize_activations(x.cpu())
        values = (codes.double() * scales.double()[:, None]).to(x.device)
    expected = values @ numbers(w).t()
    magnitude = values.abs() @ numbers(w).abs().t()
    if w.minima is not None:
        # A code's part and the minimum may nearly cancel, and the product is made of both.
        magnitude = magnitude * 40
    if bias is not None:
        expected = expected + bias.double()
        magnitude = magnitude + bias.double().abs()
    assert found.dtype == x.dtype and found.shape == expected.shape
    if w.activations is Activations.INT8_TOKEN:
        bound = EPSILON[x.dtype] * expected.abs() + 2**-19 * magnitude
    else:
        bound = (2 * EPSILON[x.dtype] + 2**-17) * magnitude
    wrong = ~((found.double() - expected).abs() <= bound)
    assert not wrong.any(), (wrong.sum().item(), wrong.nonzero()[0].tolist())
