"""The compiled kernels against the reference, and the pool of threads under them."""

import dataclasses
import threading

import pytest
import torch
from encoded import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.contracts.encoding import Activations, Encoding
from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension

pytestmark = pytest.mark.skipif(
    extension.load() is None, reason="the extension was not built, or HMT_KERNELS=reference"
)
QUANTIZED = [
    Encoding.INT8_CHANNEL,
    Encoding.INT8_GROUP,
    Encoding.INT4_GROUP,
    Encoding.NVFP4,
    Encoding.MXFP4,
]


@pytest.fixture(params=[1, 3])
def threads(request):
    native, before = extension.load(), torch.get_num_threads()
    pool = native.threads()
    native.set_threads(request.param)
    torch.set_num_threads(request.param)
    yield
    native.set_threads(pool)
    torch.set_num_threads(before)


@given(
    encoding=st.sampled_from(QUANTIZED),
    group=st.sampled_from([32, 64, 128]),
    groups=st.integers(1, 40),
    rows=st.integers(1, 70),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_integer_products_equal_the_reference_to_the_bit(
    encoding, group, groups, rows, tokens, seed
):
    columns = group * groups
    w = random_weight(
        encoding, rows, columns, group=group, activations=Activations.INT8_TOKEN, seed=seed
    )
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.linear(x, w), reference.linear(x, w))


@given(
    encoding=st.sampled_from([Encoding.INT4_GROUP, Encoding.MXFP4]),
    offsets=st.sampled_from(["", "zeros", "minima"]),
    groups=st.integers(1, 40),
    rows=st.integers(1, 70),
    tokens=st.sampled_from([*range(1, 13), 31, 50]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_products_with_a_scale_per_group_equal_the_reference_to_the_bit(
    encoding, offsets, groups, rows, tokens, seed
):
    random = torch.Generator().manual_seed(seed)
    w = random_weight(encoding, rows, 32 * groups, activations=Activations.INT8_GROUP, seed=seed)
    if encoding is Encoding.INT4_GROUP and offsets == "zeros":
        zeros = torch.randint(0, 16, w.scales.shape, generator=random, dtype=torch.uint8)
        w = dataclasses.replace(w, zeros=zeros)
    elif encoding is Encoding.INT4_GROUP and offsets == "minima":
        minima = torch.randn(w.scales.shape, generator=random).to(w.scales.dtype)
        w = dataclasses.replace(w, minima=minima)
    x = torch.randn(tokens, 32 * groups, generator=random)
    x[:, ::33] *= 50
    x[-1, :32] = 0
    assert torch.equal(ops.linear(x, w), reference.linear(x, w))


def test_the_largest_products_do_not_overflow():
    for encoding in QUANTIZED:
        w = random_weight(encoding, 2, 8192, group=128, activations=Activations.INT8_TOKEN)
        w.data.fill_(-128 if w.data.dtype == torch.int8 else 0xFF)
        for sign in (1.0, -1.0):
            x = torch.full((1, 8192), sign)
            assert torch.equal(ops.linear(x, w), reference.linear(x, w))
        assert ops.linear(x, w).abs().max() > 0


def test_a_product_too_long_for_int32_is_left_to_the_reference():
    columns = (1 << 31) // (127 * 128) + 2
    w = random_weight(Encoding.INT8_CHANNEL, 1, columns, activations=Activations.INT8_TOKEN)
    w.data.fill_(127)
    found = ops.linear(torch.ones(1, columns), w)
    torch.testing.assert_close(found, columns * 127.0 * w.scales[None])


@pytest.mark.parametrize("encoding", [Encoding.FP8_BLOCK, *QUANTIZED])
def test_dequantized_numbers_equal_the_reference_to_the_bit(encoding):
    for rows, columns in ((1, 64), (67, 320), (130, 1152)):
        w = random_weight(encoding, rows, columns, group=64)
        assert torch.equal(ops.dequantize(w, torch.float32), reference.dequantize(w, torch.float32))


def test_every_fp8_code_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    w = random_weight(Encoding.FP8_BLOCK, 1, 256)
    w = dataclasses.replace(w, data=codes.view(torch.float8_e4m3fn), scales=w.scales.fill_(1))
    found, expected = ops.dequantize(w, torch.float32), w.data.float()
    number = ~expected.isnan()
    assert number.sum() == 254 and torch.equal(found[number], expected[number])


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_quantized_activations_equal_the_reference_to_the_bit(tokens, columns, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=random)
    x *= 10 ** torch.randint(-30, 30, (tokens, 1), generator=random)
    codes, scales = ops.quantize_activations(x)
    expected_codes, expected_scales = reference.quantize_activations(x)
    assert torch.equal(codes, expected_codes) and torch.equal(scales, expected_scales)


def test_results_do_not_depend_on_the_number_of_threads(threads):
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    for encoding in QUANTIZED:
        w = random_weight(encoding, 1000, 1024, activations=Activations.INT8_TOKEN)
        assert torch.equal(ops.linear(x, w), reference.linear(x, w))
    w = random_weight(Encoding.BF16, 1000, 1024)
    alone = torch.cat(
        [
            ops.linear(x, dataclasses.replace(w, shape=(50, 1024), data=part))
            for part in w.data.split(50)
        ],
        dim=1,
    )
    assert torch.equal(ops.linear(x, w), alone)


def test_callers_on_many_threads_take_turns(threads):
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    weights = [
        random_weight(Encoding.INT4_GROUP, 600, 512, activations=Activations.INT8_TOKEN, seed=i)
        for i in range(4)
    ]
    expected = [reference.linear(x, w) for w in weights]
    wrong = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(ops.linear(x, weights[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_reading_memory_adds_up_its_words(threads):
    words = torch.randint(-(2**62), 2**62, (1_000_003,))
    total = extension.load().sum_words(words.data_ptr(), len(words))
    assert total == sum(words.tolist()) % 2**64


def test_weights_that_are_not_dense_are_left_to_the_reference():
    w = random_weight(Encoding.INT8_CHANNEL, 6, 64, activations=Activations.INT8_TOKEN)
    wide = dataclasses.replace(w, data=torch.stack((w.data, w.data), dim=2)[:, :, 0])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert not wide.data.is_contiguous()
    assert torch.equal(ops.linear(x, wide), ops.linear(x, w))
    assert torch.equal(ops.linear(x.T.contiguous().T, w), ops.linear(x, w))
