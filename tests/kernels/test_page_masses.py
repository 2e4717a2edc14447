"""What part of its attention a token gives to each page: compiled, against the definition."""

import pytest
import torch
from instruction_sets import without_tiles

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension
from hmt.kernels.ops import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

SHAPES = {
    "grouped": (2, 64, 32, False, 8),
    "odd": (3, 40, 24, False, 3),
    "latent": (1, 72, 64, True, 5),
    "many rows": (1, 16, 16, False, 70),
}
# bf16 queries meet bf16 pages in products of bf16, and codes in whole numbers.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 1e-4}


def instructions():
    native = extension.load()
    return ["reference"] if native is None else without_tiles(native)


@pytest.fixture(params=instructions())
def isa(request):
    native = extension.load()
    if native is None:
        yield
        return
    before = native.isa()
    native.set_isa(request.param)
    yield
    native.set_isa(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", PageEncoding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_masses_are_those_of_the_reference(isa, shape, encoding, dtype, softcap):
    heads, key_dim, value_dim, latent, q_heads = SHAPES[shape]
    layout = PageLayout(encoding, heads, key_dim, value_dim, latent)
    random = torch.Generator().manual_seed(2)
    count = 37
    pages = Pages(layout, torch.zeros(count + 3, 2, layout.page_bytes, dtype=torch.uint8))
    table = torch.randperm(count + 3, generator=random)[:count]
    whole = AttentionMetadata([PagedSegment(0, 16 * count, 0, table)])
    key = torch.randn(16 * count, heads, key_dim, generator=random).bfloat16()
    value = torch.randn(16 * count, heads, value_dim, generator=random).bfloat16()
    reference.append_pages(pages, 1, whole, key, None if latent else value)
    query = torch.randn(3, q_heads, key_dim, generator=random).to(dtype)
    asked = [
        PagedSegment(0, 2, 16 * count - 1, table, 16 * count),
        PagedSegment(2, 1, 79, table[:5]),
    ]
    _, lse = reference.paged_attention(
        pages, 1, AttentionMetadata([PagedSegment(0, 3, 16 * count - 3, table)]), query, scale=0.3,
        softcap=softcap,
    )  # fmt: skip
    lse += 0.5  # of more than is here
    how = {"scale": 0.3, "softcap": softcap}
    found = ops.page_masses(pages, 1, AttentionMetadata(asked), query, lse, **how)
    wanted = reference.page_masses(pages, 1, AttentionMetadata(asked), query, lse, **how)
    for some, expected in zip(found, wanted, strict=True):
        assert some.shape == expected.shape
        torch.testing.assert_close(some, expected, rtol=3e-3, atol=NEAR[dtype])
