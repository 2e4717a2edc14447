"""Weights of other people's formats: in memory they are what their publishers make of them.

published.safetensors holds what reference packages wrote and dequantised: see
make_published_golden.py.  AWQ and GPTQ are packed here, number by number.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from publishers import awq_words, words
from safetensors.torch import load_file

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import ops, panel_packing, reference
from hmt.quant import empty_weight
from hmt.quant.repacking.awq import AWQ
from hmt.quant.repacking.bits import unpack_bits
from hmt.quant.repacking.bitsandbytes import BitsAndBytesInt8, BitsAndBytesTable
from hmt.quant.repacking.compressed_tensors import CompressedIntegers
from hmt.quant.repacking.fp4 import MXFP4, NVFP4
from hmt.quant.repacking.fp8 import FP8
from hmt.quant.repacking.gptq import GPTQ

F16, F32 = torch.float16, torch.float32
ROWS, COLUMNS = 20, 96
Parts = dict[str, torch.Tensor]


@cache
def golden() -> dict[str, Parts]:
    cases: dict[str, Parts] = {}
    for name, tensor in load_file(Path(__file__).with_name("published.safetensors")).items():
        case, part = name.split("/")
        cases.setdefault(case, {})[part] = tensor
    return cases


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, at an odd address."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return torch.cat((raw.new_zeros(1), raw))[1:]


def unpacked(form: Any, parts: Parts, shape: tuple[int, int], first: int = 0) -> WeightTensor:
    target = empty_weight(form.format(shape), shape)
    form.unpack({name: as_bytes(part) for name, part in parts.items()}, target, first)
    return target


def numbers(w: WeightTensor) -> torch.Tensor:
    """In f32; reference and compiled kernels agree."""
    exact = reference.dequantize(w, F32)
    assert torch.equal(ops.dequantize(w, F32), exact)
    return exact


def packed(bits: int, groups: int, *, symmetric: bool) -> CompressedIntegers:
    return CompressedIntegers(bits, True, groups, "BF16", symmetric, ROWS)


@pytest.mark.parametrize(
    ("case", "form", "encoding"),
    [
        ("pack-4-group", packed(4, 3, symmetric=True), Encoding.INT4_GROUP),
        ("pack-4-channel", packed(4, 1, symmetric=True), Encoding.INT4_GROUP),
        ("pack-4-zeros", packed(4, 3, symmetric=False), Encoding.INT4_GROUP),
        ("pack-3-group", packed(3, 3, symmetric=True), Encoding.INT4_GROUP),
        ("pack-8-group", packed(8, 3, symmetric=True), Encoding.INT8_GROUP),
        ("pack-8-zeros", packed(8, 1, symmetric=False), Encoding.INT8_GROUP),
        ("int-channel", CompressedIntegers(8, False, 1, "BF16", True, 0), Encoding.INT8_CHANNEL),
        ("int-tensor", CompressedIntegers(8, False, 0, "BF16", True, 0), Encoding.INT8_CHANNEL),
        ("float-tensor", FP8((0, 0), "BF16"), Encoding.FP8_BLOCK),
        ("float-channel", FP8((1, 0), "BF16"), Encoding.FP8_BLOCK),
        ("float-block", FP8((16, 64), "BF16"), Encoding.FP8_BLOCK),
        ("mxfp4", MXFP4(), Encoding.MXFP4),
        ("nf4", BitsAndBytesTable(64, "F32"), Encoding.F32),
        ("fp4", BitsAndBytesTable(64, "F16"), Encoding.F16),
    ],
)
def test_numbers_are_those_of_the_reference(case: str, form: Any, encoding: Encoding) -> None:
    parts = golden()[case]
    if isinstance(form, FP8):
        parts = parts | {"scales": parts["weight_scale"]}
    w = unpacked(form, parts, (ROWS, COLUMNS))
    assert w.encoding is encoding
    wanted = parts["wanted"].to(F32)
    assert torch.equal(numbers(w), wanted)


def test_nested_scales_of_bitsandbytes() -> None:
    parts = golden()["nf4-nested"]
    form = BitsAndBytesTable(64, "BF16", 256, float(parts["nested_offset"]))
    assert torch.equal(unpacked(form, parts, (ROWS, COLUMNS)).data, parts["wanted"])
    codes = parts["weight"].view(ROWS, -1)[5:12]
    part = unpacked(form, parts | {"weight": codes}, (7, COLUMNS), first=5)
    assert torch.equal(part.data, parts["wanted"][5:12])


def test_bitsandbytes_int8_to_the_last_place() -> None:
    parts = golden()["bnb-int8"]
    found = numbers(unpacked(BitsAndBytesInt8(), parts, (ROWS, COLUMNS)))
    torch.testing.assert_close(found, parts["wanted"], rtol=2**-22, atol=0)


def test_nvfp4_of_compressed_tensors_and_of_modelopt() -> None:
    parts = golden()["nvfp4"]
    found = numbers(unpacked(NVFP4(divides=True), parts, (ROWS, COLUMNS)))
    assert torch.equal(found.bfloat16(), parts["wanted"])
    codes = [
        [pair >> shift & 15 for pair in row for shift in (0, 4)] for row in parts["codes"].tolist()
    ]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    plain = grid[torch.tensor(codes)]
    for divides in (True, False):
        factor = 1 / parts["factor"] if divides else parts["factor"]
        wanted = plain * (parts["scales"].float() * factor).repeat_interleave(16, 1)
        assert torch.equal(numbers(unpacked(NVFP4(divides), parts, (ROWS, COLUMNS))), wanted)
    narrow = {"codes": parts["codes"][:, :40], "scales": parts["scales"][:, :5]} | {
        "factor": parts["factor"]
    }
    odd = unpacked(NVFP4(divides=False), narrow, (ROWS, 80))
    assert odd.encoding is Encoding.F32 and torch.equal(odd.data, wanted[:, :80])


def test_rows_of_two_weights_by_turns() -> None:
    parts = golden()["mxfp4"]
    for turn in (0, 1):
        w = unpacked(MXFP4(2, turn), parts, (ROWS // 2, COLUMNS))
        assert torch.equal(numbers(w), parts["wanted"][turn::2])


@given(st.integers(1, 8), st.integers(1, 90), st.integers(0, 9))
def test_bits_ofwords(bits: int, count: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, count), generator=random).tolist()
    words = [sum(code << bits * at for at, code in enumerate(row)) for row in codes]
    size = -(-count * bits // 32) * 4
    raw = torch.frombuffer(
        bytearray(b"".join(w.to_bytes(size, "little") for w in words)), dtype=torch.uint8
    )
    assert unpack_bits(raw.view(torch.int32).view(3, -1), bits, count).tolist() == codes


@settings(max_examples=12)
@given(
    st.sampled_from([0, 16, 32, 64]),
    st.sampled_from([(0, 24), (8, 16), (8, 12)]),
    st.integers(0, 9),
)
def test_awq(group: int, rows: tuple[int, int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    outputs, inputs, groups = 24, 64, 64 // (group or 64)
    codes = torch.randint(0, 16, (outputs, inputs), generator=random)
    zeros = torch.randint(0, 16, (outputs, groups), generator=random)
    scales = torch.randn(groups, outputs, generator=random).half()

    parts = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}
    wanted = (codes - zeros.repeat_interleave(inputs // groups, 1)).float()
    wanted *= scales.T.float().repeat_interleave(inputs // groups, 1)
    first, count = rows
    w = unpacked(AWQ(outputs, group), parts, (count, inputs), first=first)
    assert torch.equal(numbers(w), wanted[first : first + count])
    assert w.encoding is Encoding.INT4_GROUP
    with pytest.MonkeyPatch.context() as plainly:
        plainly.setattr(panel_packing.extension, "load", lambda: None)
        plain = unpacked(AWQ(outputs, group), parts, (count, inputs), first=first)
    for name in ("data", "scales", "zeros"):  # bytes behind the last row, too
        assert torch.equal(getattr(plain, name), getattr(w, name))


@settings(max_examples=30)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([0, 32]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1]),
    st.integers(0, 9),
)
def test_gptq(
    bits: int, group: int, symmetric: bool, ordered: bool, less_one: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    outputs, inputs, groups = 32, 64, 64 // (group or 64)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=random)
    zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=random)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    scales = torch.randn(groups, outputs, generator=random).half()
    index = torch.arange(inputs) * groups // inputs
    if ordered:
        index = index[torch.randperm(inputs, generator=random)]
    parts = {
        "qweight": words(codes.tolist(), bits).T,
        "qzeros": words(((zeros - less_one) % (1 << bits)).T.tolist(), bits),
        "scales": scales,
        "g_idx": index.to(torch.int32),
    }
    wanted = (codes - zeros[:, index]).float() * scales.T[:, index].float()
    if ordered:
        wanted = wanted.half().float()
    form = GPTQ(bits, outputs, group, symmetric, ordered, less_one)
    for first, count in ((0, outputs), (5, 18)):
        w = unpacked(form, parts, (count, inputs), first=first)
        assert torch.equal(numbers(w), wanted[first : first + count])
    assert (w.encoding is Encoding.F16) == ordered


def test_a_zero_point_where_the_configuration_says_there_is_none() -> None:
    parts = {
        "qweight": words([[5] * 64] * 32, 4).T,
        "qzeros": words([[7] * 31 + [6]], 4),
        "scales": torch.ones(1, 32, dtype=F16),
    }
    with pytest.raises(CheckpointError, match=r"zero point of 7 where .* symmetric, which means 8"):
        unpacked(GPTQ(4, 32, 0, True, False, 1), parts, (32, 64))
    with pytest.raises(CheckpointError, match="g_idx is not in order"):
        order = torch.tensor([1, 0] * 32, dtype=torch.int32)
        more = {"scales": parts["scales"].expand(2, 32), "qzeros": parts["qzeros"].expand(2, 4)}
        form = GPTQ(4, 32, 32, False, False, 1, in_order=True)
        unpacked(form, parts | more | {"g_idx": order}, (32, 64))
    with pytest.raises(CheckpointError, match="names groups 0 to 9 of 1"):
        order = torch.tensor([0, 9] * 32, dtype=torch.int32)
        form = GPTQ(4, 32, 0, True, True, 1)
        unpacked(form, parts | {"g_idx": order}, (32, 64))
