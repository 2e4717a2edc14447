"""Pages between plain rows near and words far, to the bit as the reference rewrites them."""

import pytest
import torch

from hmt.kernels import reference
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

rewriting = pytest.importorskip("hmt.kernels.triton.transfer.kv_repack")

SHAPES = {
    "grouped": (2, 64, 64, False),
    "odd": (3, 80, 36, False),
    "latent": (1, 72, 64, True),
}
NEAR = [PageEncoding.F32, PageEncoding.BF16, PageEncoding.F16, PageEncoding.FP8]
SENT = torch.tensor([4, 0, 3])
SLOTS = torch.tensor([1, 5, 2])


def filled(layout, count, layers):
    """Pages whose every number is set, some rows being zero or large."""
    pages = Pages(layout, torch.zeros(count, layers, layout.page_bytes, dtype=torch.uint8))
    random = torch.Generator().manual_seed(5)
    runs = AttentionMetadata([PagedSegment(0, 16 * count, 0, torch.arange(count))])
    for layer in range(layers):
        key, value = (
            torch.randn(16 * count, layout.heads, dim, generator=random)
            for dim in (layout.key_dim, layout.value_dim)
        )
        key[17] = 0
        key[3] *= 1000
        value[5, 0, 7] = -6e4
        reference.append_pages(pages, layer, runs, key, None if layout.latent else value)
    return pages


def empty(layout, count, layers, device=None):
    memory = torch.zeros(count, layers, layout.page_bytes, dtype=torch.uint8)
    if device is None:
        return Pages(layout, memory.pin_memory() if torch.cuda.is_available() else memory)
    return Pages(layout, memory.to(device))


def rewritten(target, numbers, source, slots):
    """What the reference makes of it."""
    runs = AttentionMetadata([PagedSegment(0, 16 * len(numbers), 0, numbers)])
    for layer in range(source.memory.shape[1]):
        key, value = reference.read_pages(source, layer, slots, 16 * len(slots))
        given = None if target.layout.latent else value
        reference.append_pages(target, layer, runs, key, given)


def layouts(shape, near, far):
    far = near if far is None else far
    return PageLayout(near, *SHAPES[shape], rows=True), PageLayout(far, *SHAPES[shape])


@pytest.mark.parametrize("far", [None, PageEncoding.INT8, PageEncoding.FP8])
@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_sent_are_those_of_the_reference(device, shape, near, far):
    if near is PageEncoding.FP8 and far not in (None, near):
        pytest.skip("codes come from numbers of more bits")
    near_layout, far_layout = layouts(shape, near, far)
    source = filled(near_layout, 5, 3)
    found, expected = empty(far_layout, 6, 3), empty(far_layout, 6, 3)
    there = Pages(near_layout, source.memory.to(device))
    rewriting.send_pages(there, SENT.to(device), found, SLOTS.to(device))
    rewritten(expected, SLOTS, source, SENT)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(found.memory, expected.memory)


@pytest.mark.parametrize("far", [None, PageEncoding.INT8, PageEncoding.FP8])
@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_fetched_are_those_of_the_reference(device, shape, near, far):
    if far is PageEncoding.INT8 and near is PageEncoding.BF16 and device.type == "cpu":
        pytest.skip("Triton's interpreter truncates what it rounds to bf16")
    if near is PageEncoding.FP8 and far not in (None, near):
        pytest.skip("codes come from numbers of more bits")
    near_layout, far_layout = layouts(shape, near, far)
    held = filled(far_layout, 6, 3)
    source = empty(far_layout, 6, 3)
    source.memory.copy_(held.memory)
    found, expected = empty(near_layout, 5, 3, device), empty(near_layout, 5, 3)
    rewriting.fetch_pages(found, SENT.to(device), source, SLOTS.to(device))
    rewritten(expected, SENT, source, SLOTS)
    assert torch.equal(found.memory.cpu(), expected.memory)
    for layer in range(3):
        key, value = reference.read_pages(expected, layer, SENT, 48)
        rows = [torch.zeros(x.shape, dtype=key.dtype, device=device) for x in (key, value)]
        rewriting.fetch_rows(*rows, source, layer, SLOTS.to(device))
        assert torch.equal(rows[0].cpu(), key)
        assert near_layout.latent or torch.equal(rows[1].cpu(), value)


def test_what_has_no_kernel_is_told():
    rows = PageLayout(PageEncoding.BF16, 2, 64, 64, rows=True)
    for encoding, known in (
        (PageEncoding.BF16, True),
        (PageEncoding.INT8, True),
        (PageEncoding.FP8, True),
        (PageEncoding.INT4, False),
        (PageEncoding.F32, False),
    ):
        assert rewriting.can_rewrite(rows, PageLayout(encoding, 2, 64, 64)) is known
    assert not rewriting.can_rewrite(PageLayout(PageEncoding.BF16, 2, 64, 64), rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_fetched_without_those_that_are_not_wanted(device, shape):
    near_layout, far_layout = layouts(shape, PageEncoding.F32, None)
    held = filled(far_layout, 6, 3)
    source = empty(far_layout, 6, 3)
    source.memory.copy_(held.memory)
    found, expected = empty(near_layout, 7, 1, device), empty(near_layout, 7, 1)
    slots = torch.tensor([5, 0, 2, -1, -1])
    rewriting.fetch_layer(found, source, 2, slots.to(device))
    key, value = reference.read_pages(source, 2, slots[:3], 48)
    runs = AttentionMetadata([PagedSegment(0, 48, 0, torch.arange(3))])
    reference.append_pages(expected, 0, runs, key, None if near_layout.latent else value)
    assert torch.equal(found.memory.cpu(), expected.memory)
