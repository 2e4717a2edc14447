"""GGUF blocks in memory are, to the last bit of f32, what ggml makes of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hmt.base.errors import CheckpointError
from hmt.contracts.checkpoint import FormName
from hmt.contracts.encoding import BLOCK_SHAPES, WeightTensor
from hmt.kernels import gguf_packing, ops, reference
from hmt.kernels.cpu import extension
from hmt.quant import empty_weight
from hmt.quant.repacking import WeightImporter, open_importer

# (numbers, bytes) of a block.
BLOCKS = {encoding.name: (shape.numbers, shape.nbytes) for encoding, shape in BLOCK_SHAPES.items()}
BLOCKS |= {"Q4_0": (32, 18), "Q4_1": (32, 20), "MXFP4": (32, 17)}

# Where blocks have their f16 scales; at byte 0 where nothing is said.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
WRITTEN = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
)  # by the package's own quantisers
ROWS, COLUMNS = 40, 512


def set_half(kind: str, raw: np.ndarray, at: int, halves: np.ndarray) -> None:
    """Write an f16 [blocks, 1] into blocks; that of IQ1_M is spread over four words."""
    if kind != "IQ1_M":
        raw[:, at : at + 2] = halves.view(np.uint8)
        return
    bits = halves.view(np.uint16)
    for word in range(4):
        high = raw[:, 49 + 2 * word : 50 + 2 * word]
        high[:] = (high & 15) | ((bits >> 4 * word & 15) << 4).astype(np.uint8)


def random_blocks(kind: str) -> np.ndarray:
    """Valid blocks of any bytes: uint8 [ROWS, bytes of a row]."""
    rng = np.random.default_rng(len(kind) + ord(kind[1]))
    blocks = ROWS * COLUMNS // BLOCKS[kind][0]
    raw = rng.integers(0, 256, (blocks, BLOCKS[kind][1]), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(0, 250, blocks)  # the largest overflow, in ggml as well
    else:
        for at in HALVES.get(kind, (0,)):
            halves = rng.normal(0, 0.02, (blocks, 1)).astype(np.float16)
            halves[:8] = [[0.0], [-0.0], [6e-8], [-6e-8], [6e-5], [65504], [-65504], [1.0]]
            set_half(kind, raw, at, halves)
    return raw.reshape(ROWS, -1)


def unpacked(kind: str, raw: np.ndarray, turned: int = 0) -> WeightTensor:
    form = open_importer(FormName("gguf", (("kind", kind), ("turned", turned))))
    assert isinstance(form, WeightImporter)
    shape = (len(raw), COLUMNS)
    weight = empty_weight(form.format(shape), shape)
    odd = torch.zeros(raw.size + 1, dtype=torch.uint8)[1:]  # at an odd address, as in a file
    odd.copy_(torch.from_numpy(raw).flatten())
    form.unpack({"blocks": odd}, weight, 0)
    return weight


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.int32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_ggml_to_the_last_bit(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    cases = [random_blocks(kind)]
    if kind in WRITTEN:
        numbers = np.random.default_rng(0).normal(0, 0.1, (ROWS, COLUMNS)).astype(np.float32)
        cases.append(gguf.quantize(numbers, number))
    for raw in cases:
        expected = torch.from_numpy(gguf.dequantize(raw, number))
        weight = unpacked(kind, raw)
        for compute in (reference, ops):
            found = compute.dequantize(weight, torch.float32)
            assert torch.equal(bits(found), bits(expected)), compute.__name__
        turned = unpacked(kind, raw, turned=20)
        heads = expected.view(2, 10, 2, COLUMNS).transpose(1, 2).reshape(expected.shape)
        assert torch.equal(bits(ops.dequantize(turned, torch.float32)), bits(heads))


@pytest.mark.parametrize("kind", BLOCKS)
def test_one_pass_gives_the_bytes_that_plain_torch_gives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every instruction set, for rows in order or not, and panels that are not full."""
    native = extension.load()
    if native is None:
        pytest.skip("the extension was not built, or HMT_KERNELS=reference")
    raw = random_blocks(kind)
    before = native.isa()
    for turned in (0, 20):
        with monkeypatch.context() as plainly:
            plainly.setattr(gguf_packing.extension, "load", lambda: None)
            plain = unpacked(kind, raw, turned)
        for isa in native.isas():
            native.set_isa(isa)
            found = unpacked(kind, raw, turned)
            native.set_isa(before)
            for name in ("data", "scales", "minima"):
                one, other = getattr(found, name), getattr(plain, name)
                assert (one is None) is (other is None)
                if one is not None:
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (isa, name)


@pytest.mark.parametrize("kind", ["Q5_K", "Q5_1", "Q6_K", "Q2_K", "Q4_K"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_numbers(kind: str, tokens: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    raw = random_blocks(kind)
    for at in HALVES.get(kind, (0,)):
        size = BLOCKS[kind][1]
        halves = rng.normal(0, 0.02, (raw.size // size, 1)).astype(np.float16)
        set_half(kind, raw.reshape(-1, size), at, halves)
    weight = unpacked(kind, raw)
    numbers = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind])).double()
    x = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.linspace(-1, 1, ROWS)
    expected = x.double() @ numbers.T
    size = x.double().abs() @ numbers.abs().T  # products cancel
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    params = {"one": weight, "two": weight, "two_bias": WeightTensor("f32", (ROWS,), bias)}
    for compute in (reference, ops):
        found = compute.linear_many(x, params, ("one", "two")).double()
        assert found.shape == (tokens, 2 * ROWS)
        assert ((found[:, :ROWS] - expected).abs() <= tolerance * (size + 1)).all()
        assert ((found[:, ROWS:] - expected - bias).abs() <= tolerance * (size + 1)).all()


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    form = open_importer(FormName("gguf", (("kind", "Q4_K"), ("turned", 0))))
    with pytest.raises(CheckpointError, match="blocks of 256"):
        form.format((16, 128))
