"""What an indexer selects by Triton's kernels, against f64 and a stable sort."""

import pytest
import torch

from hmt.kernels import reference
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
)

selection = pytest.importorskip("hmt.kernels.triton.attention.index_selection")


def scores_of(query, weights, keys, scale):
    """By the definition, in f64: [tokens, positions]."""
    products = torch.einsum("thd,pd->thp", query.double(), keys.double()) * scale
    return torch.einsum("th,thp->tp", weights.double(), products.clamp(min=0))


def first_largest(scores, top_k):
    """Of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices[:top_k].sort().values


def same_but_for_rounding(found, scores, top_k, near):
    assert found.shape == (top_k,) and (found.diff() > 0).all() and found[-1] < len(scores)
    left = torch.ones(len(scores), dtype=torch.bool)
    left[found] = False
    if left.any():
        assert scores[found].min() >= scores[left].max() - near


@pytest.mark.parametrize("encoding", [e for e in PageEncoding if e is not PageEncoding.INT4])
@pytest.mark.parametrize(("heads", "dim", "top_k"), [(5, 40, 33), (64, 128, 7), (17, 16, 300)])
def test_the_best_of_pages(device, encoding, heads, dim, top_k):
    random = torch.Generator().manual_seed(heads)
    dtype = {PageEncoding.F32: torch.float32, PageEncoding.F16: torch.float16}.get(
        encoding, torch.bfloat16
    )
    layout = PageLayout(encoding, 1, dim, dim, latent=True, rows=True)
    memory = torch.zeros(24, 2, layout.page_bytes, dtype=torch.uint8, device=device)
    pages, table = Pages(layout, memory), torch.randperm(24, generator=random).to(device)
    context, tokens = 351, 3
    keys = torch.randn(context, 1, dim, generator=random).to(dtype).to(device)
    whole = AttentionMetadata([PagedSegment(0, context, 0, table)])
    reference.append_pages(pages, 1, whole, keys, None)
    held = reference.read_pages(pages, 1, table, context)[0][:, 0].cpu()
    query = torch.randn(tokens, heads, dim, generator=random).to(dtype)
    weights = torch.randn(tokens, heads, generator=random)
    start, options = context - tokens, {"top_k": top_k, "scale": dim**-0.5}
    asked = query.to(device), weights.to(device)
    found = selection.paged_index_topk(*asked, pages, 1, table, start=start, **options)
    wanted = scores_of(query, weights, held, dim**-0.5)
    for row, positions in enumerate(found.cpu()):
        seen = wanted[row, : start + row + 1]
        same_but_for_rounding(positions, seen, top_k, 1e-4 * float(seen.abs().max()))
    # A captured step has the shapes of the longest context, and its start on the device.
    where = torch.tensor([start], device=device)
    captured = selection.paged_index_topk(*asked, pages, 1, table, start=where, **options)
    assert torch.equal(captured, found)
    alone = [part[2:] for part in asked]
    assert torch.equal(
        selection.paged_index_topk(*alone, pages, 1, table, start=start + 2, **options)[0], found[2]
    )


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("top_k", [1, 5, 40, 300])
def test_of_equal_scores_the_first_are_selected(device, group, top_k):
    random = torch.Generator().manual_seed(3)
    start = 340 * group
    query = torch.randint(-2, 3, (4, 2, 4), generator=random).float()
    keys = torch.randint(-1, 2, (350, 4), generator=random).float()
    weights = torch.randint(-1, 2, (4, 2), generator=random).float()
    found = selection.index_topk(
        query.to(device), weights.to(device), keys.to(device), start=start, top_k=top_k, scale=0.5,
        positions=group,
    )  # fmt: skip
    scores = scores_of(query, weights, keys, 0.5)
    for row, positions in enumerate(found.cpu()):
        seen = (start + row + 1) // group
        assert torch.equal(positions, first_largest(scores[row, :seen], top_k))


def test_a_captured_step_may_see_less_than_it_selects(device):
    query, weights = torch.ones(1, 2, 4, device=device), torch.ones(1, 2, device=device)
    keys = torch.randn(64, 4, device=device)
    where = torch.tensor([4], device=device)
    found = selection.index_topk(query, weights, keys, start=where, top_k=8, scale=1.0)
    assert found[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
