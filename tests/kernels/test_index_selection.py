"""What an indexer selects, by the definition; and rows that are gathered from pages."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import without_tiles

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension, index_selection
from hmt.kernels.cpu.operations import CompiledOperations
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
)

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = [
    PageLayout(encoding, heads, 24, 16, latent, rows)
    for encoding in PageEncoding
    for rows in (False, True)
    for heads, latent in ((1, True), (3, False))
    if not (rows and encoding is PageEncoding.INT4)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_single_rows_are_those_of_whole_pages(layout: PageLayout) -> None:
    random = torch.Generator().manual_seed(1)
    memory = torch.randint(0, 255, (9, 2, layout.page_bytes), generator=random, dtype=torch.uint8)
    pages, table, tokens = Pages(layout, memory), torch.tensor([7, 0, 3, 5]), 60
    key = torch.randn(tokens, layout.heads, 24, generator=random)
    value = None if layout.latent else torch.randn(tokens, layout.heads, 16, generator=random)
    runs = AttentionMetadata([PagedSegment(0, tokens, 0, table)])
    reference.append_pages(pages, 1, runs, key, value)
    wanted, values = reference.read_pages(pages, 1, table, tokens)
    for positions in (torch.tensor([59, 0, 17, 17, 16]), torch.arange(tokens), torch.arange(0)):
        found = ops.read_rows(pages, 1, table[positions // 16], positions % 16)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted[positions])
        if not layout.latent:
            found = ops.read_value_rows(pages, 1, table[positions // 16], positions % 16)
            assert found.dtype == values.dtype and torch.equal(found, values[positions])


def wanted_of(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores by the definition, in f64: [tokens, positions]."""
    products = torch.einsum("thd,pd->thp", query.double(), keys.double()) * query.shape[2] ** -0.5
    return torch.einsum("th,thp->tp", weights.double(), products.clamp(min=0))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    heads=st.integers(1, 9),
    dim=st.sampled_from([2, 8, 34]),
    tokens=st.integers(1, 7),
    start=st.integers(0, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_the_best_positions_are_selected(
    seed: int,
    heads: int,
    dim: int,
    tokens: int,
    start: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    random = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(1, start + 1))
    query = torch.randn(tokens, heads, dim, generator=random).to(dtype)
    keys = torch.randn(start + tokens + 3, dim, generator=random).to(dtype)
    weights = torch.randn(tokens, heads, generator=random)
    options = {"top_k": top_k, "scale": dim**-0.5}
    found = ops.index_topk(query, weights, keys, start=start, **options)
    assert found.shape == (tokens, top_k) and found.dtype == torch.int64
    scores = wanted_of(query, weights, keys)
    for row, positions in enumerate(found):
        seen = start + row + 1
        assert (positions.diff() > 0).all() and positions[-1] < seen
        left = torch.ones(seen, dtype=torch.bool)
        left[positions] = False
        if left.any():
            most = scores[row, :seen][left].max()
            assert scores[row, positions].min() >= most - 1e-5 * max(1.0, float(most.abs()))
        # Whatever else a step computes.
        alone = query[row : row + 1], weights[row : row + 1], keys[:seen]
        assert torch.equal(ops.index_topk(*alone, start=seen - 1, **options)[0], positions)


def test_positions_behind_the_first_block_are_scored_alike() -> None:
    random = torch.Generator().manual_seed(2)
    query, weights = (torch.randn(2, 6, dim, generator=random) for dim in (16, 1))
    keys = torch.randn(9000, 16, generator=random)
    weights = weights[..., 0].abs()
    options = {"top_k": 700, "scale": 0.25}
    found = ops.index_topk(query, weights, keys, start=8990, **options)
    scores = wanted_of(query, weights, keys)
    for row, positions in enumerate(found):
        best = scores[row, : 8991 + row].topk(700).indices.sort().values
        assert len(set(best.tolist()) ^ set(positions.tolist())) <= 2, "the last may be a tie"


@pytest.mark.parametrize("top_k", [1, 5, 40, 99])
def test_equal_scores_are_selected_as_torch_does(top_k: int) -> None:
    """Of exactly the positions that a token sees; whole numbers have one score in any order."""
    random = torch.Generator().manual_seed(3)
    query = torch.randint(-2, 3, (8, 2, 4), generator=random).float()
    keys = torch.randint(-1, 2, (107, 4), generator=random).float()
    weights = torch.randint(-1, 2, (8, 2), generator=random).float()
    found = ops.index_topk(query, weights, keys, start=99, top_k=top_k, scale=0.5)
    scores = wanted_of(query, weights, keys).float()
    for row, positions in enumerate(found):
        wanted = scores[row, : 100 + row].topk(top_k).indices
        assert sorted(wanted.tolist()) == positions.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_attend_to_their_own_rows(dtype: torch.dtype) -> None:
    """Against f64; and each token by itself to the same bits."""
    random = torch.Generator().manual_seed(4)
    query = torch.randn(5, 3, 24, generator=random).to(dtype)
    rows = torch.randn(60, 1, 24, generator=random).to(dtype)
    own = torch.stack([torch.randperm(60, generator=random)[:21].sort().values for _ in range(5)])
    found = ops.selected_attention(query, rows, own, 16, scale=0.3)
    for at, positions in enumerate(own):
        key = rows[positions, 0].double()
        weights = (query[at].double() @ key.T * 0.3).softmax(-1)
        near = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found[at].double(), weights @ key[:, :16], atol=near, rtol=near)
        alone = ops.selected_attention(query[at : at + 1], rows[positions], None, 16, scale=0.3)
        assert torch.equal(alone[0], found[at])


def instructions() -> list[str]:
    native = extension.load()
    return [] if native is None else without_tiles(native)


@pytest.fixture(params=instructions())
def compiled(request: pytest.FixtureRequest) -> Iterator[CompiledOperations]:
    """The extension on every instruction set."""
    native = extension.load()
    assert native is not None
    before = native.isa()
    native.set_isa(request.param)
    yield CompiledOperations(native)
    native.set_isa(before)


# 9 heads do not fill sixteen lanes, and 70 no four vectors of them; 3 and 34 numbers no line.
SIZES = [(1, 3), (9, 8), (16, 34), (70, 20)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_scores_have_the_bits_of_the_reference(
    compiled: CompiledOperations, sizes: tuple[int, int], dtype: torch.dtype, key_dtype: torch.dtype
) -> None:
    """Scores that differ in one bit would be selected otherwise: all that are larger than one."""
    heads, dim = sizes
    random = torch.Generator().manual_seed(5)
    query = torch.randn(3, heads, dim, generator=random).to(dtype)
    keys = torch.randn(700, dim, generator=random).to(key_dtype)
    weights = torch.randn(3, heads, generator=random)
    where = 16 * dim * keys.element_size()
    rows = keys.data_ptr(), where, 0
    native = extension.load()
    assert native is not None
    for row in range(3):
        wanted = reference.index_scores(query[row], weights[row], keys, dim**-0.5)
        found = torch.empty(700)
        native.index_scores(
            (index_selection.DTYPES[key_dtype], dim, *rows),
            (query.data_ptr(), index_selection.DTYPES[dtype], heads * dim, dim, 3, heads,
             weights.data_ptr(), dim**-0.5),
            row, 700, found.data_ptr(), 2,
        )  # fmt: skip
        assert torch.equal(found, wanted)
        near = wanted_of(query, weights, keys)[row]
        torch.testing.assert_close(found.double(), near, rtol=1e-4, atol=1e-4)
    for start, top_k in ((697, 1), (697, 640), (320, 321)):
        options: dict[str, Any] = {"start": start, "top_k": top_k, "scale": dim**-0.5}
        wanted = reference.index_topk(query, weights, keys, **options)
        assert torch.equal(compiled.index_topk(query, weights, keys, **options), wanted)


@pytest.mark.parametrize("encoding", PageEncoding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_pages_are_those_of_rows(
    compiled: CompiledOperations, encoding: PageEncoding, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(6)
    layout = PageLayout(encoding, 1, 32, 32, latent=True, rows=encoding is not PageEncoding.INT4)
    pages = Pages(layout, torch.zeros(60, 3, layout.page_bytes, dtype=torch.uint8))
    table, context = torch.randperm(60, generator=random), 851
    keys = torch.randn(context, 1, 32, generator=random)
    whole = AttentionMetadata([PagedSegment(0, context, 0, table)])
    reference.append_pages(pages, 1, whole, keys, None)
    query = torch.randn(5, 9, 32, generator=random).to(dtype)
    weights = torch.randn(5, 9, generator=random)
    for top_k in (1, 300, 847):
        asked = query, weights, pages, 1, table
        options: dict[str, Any] = {"start": context - 5, "top_k": top_k, "scale": 0.2}
        wanted = reference.paged_index_topk(*asked, **options)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(compiled.paged_index_topk(*asked, **options), wanted)


@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("top_k", [1, 5, 40, 99])
def test_compiled_selection_of_equal_scores_is_that_of_torch(
    compiled: CompiledOperations, top_k: int, group: int
) -> None:
    random = torch.Generator().manual_seed(3)
    query = torch.randint(-2, 3, (8, 2, 4), generator=random).float()
    keys = torch.randint(-1, 2, (107, 4), generator=random).float()
    weights = torch.randint(-1, 2, (8, 2), generator=random).float()
    options: dict[str, Any] = {"start": 99 * group, "top_k": top_k, "scale": 0.5}
    found = compiled.index_topk(query, weights, keys, positions=group, **options)
    scores = wanted_of(query, weights, keys).float()
    for row, positions in enumerate(found):
        seen = (99 * group + row + 1) // group
        wanted = scores[row, :seen].topk(top_k).indices.sort().values
        assert torch.equal(positions, wanted)


def test_nan_is_selected_as_torch_does(compiled: CompiledOperations) -> None:
    """It is above all numbers."""
    keys = torch.zeros(200, 4)
    keys[:, 0] = torch.linspace(-3, 3, 200)
    keys[7, 1] = keys[12, 0] = float("nan")
    query, weights = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), torch.ones(1, 1)
    for top_k in (1, 2, 3, 50, 200):
        options: dict[str, Any] = {"start": 199, "top_k": top_k, "scale": 1.0}
        wanted = reference.index_topk(query, weights, keys, **options)
        assert torch.equal(compiled.index_topk(query, weights, keys, **options), wanted)
