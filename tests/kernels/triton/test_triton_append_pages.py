"""Triton's writing of pages, to the bit as the reference writes them."""

import pytest
import torch

from hmt.kernels import reference
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

written = pytest.importorskip("hmt.kernels.triton.attention.append")

ENCODINGS = [x for x in PageEncoding if x is not PageEncoding.INT4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def empty_pages(layout, count, device="cpu"):
    return Pages(layout, torch.zeros(count, 2, layout.page_bytes, dtype=torch.uint8).to(device))


def steps():
    """40 tokens from position 9 in two steps, and one of another sequence."""
    table = torch.tensor([4, 0, 2, 5])
    first = [PagedSegment(1, 13, 9, table), PagedSegment(0, 1, 3, torch.tensor([3]))]
    return first, [PagedSegment(14, 27, 22, table)]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_pages_are_written_as_the_reference_writes_them(device, encoding, dtype, latent):
    layout = PageLayout(encoding, 2, 80, 80 if latent else 45, latent, rows=True)
    random = torch.Generator().manual_seed(3)
    key, value = (torch.randn(50, 2, dim, generator=random) for dim in (80, 45))
    key[3] = 0
    if dtype != torch.bfloat16 or device.type == "cuda":  # Triton's interpreter makes 0 of them
        key[4, 0] = 1e-39
    key[5, 1, 7] = 6e4
    value[2, 1, 40] = -6e4
    if dtype != torch.float16 and encoding is not PageEncoding.F16:
        key[6] *= 1e30
    key, value = key.to(dtype), value.to(dtype)
    found, expected = empty_pages(layout, 6, device), empty_pages(layout, 6)
    for step in steps():
        given = None if latent else value
        reference.append_pages(expected, 1, AttentionMetadata(step), key, given)
        given = None if latent else value.to(device)
        written.append_pages(found, 1, AttentionMetadata(step), key.to(device), given)
    assert torch.equal(found.memory.cpu(), expected.memory)


def test_rows_may_lie_apart(device):
    layout = PageLayout(PageEncoding.BF16, 2, 32, 32, rows=True)
    packed = torch.randn(41, 8, 32).bfloat16()  # queries, keys and values of a fused product
    _, key, value = packed.split((4, 2, 2), dim=1)
    _, key_there, value_there = packed.to(device).split((4, 2, 2), dim=1)
    found, expected = empty_pages(layout, 6, device), empty_pages(layout, 6)
    for step in steps():
        reference.append_pages(expected, 1, AttentionMetadata(step), key, value)
        written.append_pages(found, 1, AttentionMetadata(step), key_there, value_there)
    assert torch.equal(found.memory.cpu(), expected.memory)
