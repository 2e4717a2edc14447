"""Sizes of components, and views of them in a buffer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hmt.contracts.encoding import Activations, Encoding
from hmt.quant import Format, component_bytes, empty_weight, view_weight


@pytest.mark.parametrize(
    ("form", "shape", "expected"),
    [
        (Format(Encoding.F32), (3, 5), (60, 0)),
        (Format(Encoding.BF16), (7,), (14, 0)),
        (Format(Encoding.FP8_BLOCK, tile=(128, 128)), (129, 256), (129 * 256, 2 * 2 * 4)),
        (Format(Encoding.INT8_CHANNEL), (6, 33), (6 * 33, 6 * 4)),
        (Format(Encoding.INT4_GROUP, 32), (6, 96), (6 * 48, 6 * 3 * 4)),
    ],
)
def test_component_bytes(form, shape, expected):
    assert component_bytes(form, shape) == expected
    assert empty_weight(form, shape).nbytes == sum(expected)


@given(st.sampled_from(list(Encoding)), st.integers(1, 40), st.integers(1, 4))
def test_views_cover_the_buffer_and_share_its_memory(encoding, rows, groups):
    form = Format(encoding, 32, (16, 24), Activations.INT8_TOKEN)
    shape = (rows, 32 * groups)
    data_bytes, scale_bytes = component_bytes(form, shape)
    data = torch.zeros(data_bytes, dtype=torch.uint8)
    scales = torch.zeros(scale_bytes, dtype=torch.uint8)
    w = view_weight(form, shape, data, scales)
    assert (w.encoding, w.shape, w.activations) == (encoding, shape, Activations.INT8_TOKEN)
    assert w.data.data_ptr() == data.data_ptr() and w.data.nbytes == data_bytes
    if scale_bytes:
        w.scales.fill_(1.0)
        assert scales.view(torch.float32).eq(1).all()
    else:
        assert w.scales is None
