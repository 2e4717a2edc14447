"""Sizes of components, and views of them in a buffer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding
from hmt.kernels import reference
from hmt.kernels.reference import packing
from hmt.quant import (
    Format,
    component_bytes,
    empty_weight,
    pack_codes,
    pack_groups,
    pack_pairs,
    view_weight,
)


@pytest.mark.parametrize(
    ("form", "shape", "expected"),
    [
        (Format(Encoding.F32), (3, 5), (60,)),
        (Format(Encoding.BF16), (7,), (14,)),
        (Format(Encoding.FP8_BLOCK, tile=(128, 128)), (129, 256), (129 * 256, 2 * 2 * 4)),
        (Format(Encoding.INT8_CHANNEL), (6, 33), (6 * 33, 6 * 4)),
        (Format(Encoding.INT4_GROUP, 32), (6, 96), (16 * 48, 16 * 3 * 2)),
        (Format(Encoding.INT4_GROUP, 32, zeros=True), (17, 64), (32 * 32, 32 * 2 * 2, 32 * 2)),
        (Format(Encoding.NVFP4, 16), (16, 64), (16 * 32, 16 * 4, 4)),
        (Format(Encoding.MXFP4, 32), (1, 64), (16 * 32, 16 * 2)),
        (Format(Encoding.INT8_GROUP, 32), (6, 64), (6 * 64, 6 * 2 * 4)),
    ],
)
def test_component_bytes(form, shape, expected):
    assert component_bytes(form, shape) == expected
    assert empty_weight(form, shape).nbytes == sum(expected)


@given(st.sampled_from(list(Encoding)), st.integers(1, 40), st.integers(1, 4))
def test_views_cover_the_buffer_and_share_its_memory(encoding, rows, groups):
    form = Format(encoding, 32, (16, 24), Activations.INT8_TOKEN)
    block = BLOCK_SHAPES.get(encoding)
    shape = (rows, (32 if block is None else block.numbers) * groups)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in component_bytes(form, shape)]
    w = view_weight(form, shape, *buffers)
    assert (w.encoding, w.shape, w.activations) == (encoding, shape, Activations.INT8_TOKEN)
    for component, buffer in zip(form.components(shape), buffers, strict=True):
        view = getattr(w, component.name)
        assert view.data_ptr() == buffer.data_ptr() and view.nbytes == len(buffer)
    whole = block is not None and block.scale_at is None
    assert (w.scales is None) == (encoding.is_float or whole)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_packing_is_undone_by_unpacking(rows, blocks, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 32 * blocks), generator=random, dtype=torch.uint8)
    scales = torch.randn(rows, blocks, generator=random).bfloat16()
    w = empty_weight(Format(Encoding.INT4_GROUP, 32), (rows, 32 * blocks))
    w.data.copy_(pack_codes(codes))
    w.scales.copy_(pack_groups(scales))
    assert torch.equal(w.data, packing.pack_codes(codes))
    pairs = codes.view(rows, -1, 2)
    assert torch.equal(w.data, pack_pairs(pairs[..., 0] | pairs[..., 1] << 4))
    numbers = (codes.view(rows, blocks, 32).float() - 8) * scales.float()[..., None]
    assert torch.equal(reference.dequantize(w, torch.float32), numbers.flatten(1))


@pytest.mark.parametrize(
    ("form", "own"),
    [
        (Format(Encoding.INT4_GROUP, 32, scale_dtype=torch.float16), Activations.INT8_GROUP),
        (Format(Encoding.MXFP4, 32), Activations.INT8_GROUP),
        (Format(Encoding.INT4_GROUP, 128), Activations.INT8_TOKEN),
        (Format(Encoding.NVFP4, 16), Activations.INT8_TOKEN),
        (Format(Encoding.INT8_GROUP, 32), Activations.INT8_TOKEN),
        (Format(Encoding.Q8_0), Activations.INT8_GROUP),
        (Format(Encoding.IQ4_NL), Activations.INT8_GROUP),
        (Format(Encoding.Q4_K), Activations.INT8_BLOCK),
        (Format(Encoding.BF16), Activations.FLOAT),
    ],
)
def test_published_weights_take_activations_as_finely_rounded_as_kernels_can(form, own):
    assert form.with_activations(Activations.INT8_TOKEN).activations is own
    assert form.with_activations(Activations.FLOAT).activations is Activations.FLOAT
