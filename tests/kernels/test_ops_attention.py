"""Attention against float64 and against transformers, and the merge of its parts."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from hmt.kernels import ops, reference

# The package exports a function of the module's name.
attention = importlib.import_module("hmt.kernels.reference.attention")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(queries: int, context: int, heads=(4, 2), dims=(16, 16), seed=0) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(queries, heads[0], dims[0], generator=random),
        torch.randn(context, heads[1], dims[0], generator=random),
        torch.randn(context, heads[1], dims[1], generator=random),
    )


def exact(query, key, value, *, start, scale, window=0, softcap=0.0, only=None):
    """The definition, in float64.  `only` (bool [context]) hides the other positions."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,chd->qhc", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(start, start + len(query))[:, None]
    positions = torch.arange(len(key))
    visible = positions <= at
    if window:
        visible &= positions > at - window
    if only is not None:
        visible &= only
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("qhc,chd->qhd", weights, value), lse


@given(
    queries=st.integers(1, 9),
    before=st.integers(0, 12),
    after=st.integers(0, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8)]),
    window=st.sampled_from([0, 1, 5, 100]),
    softcap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([0.25, 3.0]),
)
@settings(max_examples=120, deadline=None)
def test_attention_is_its_definition(queries, before, after, heads, dims, window, softcap, scale):
    given = inputs(queries, before + queries + after, heads, dims)
    limits = {"start": before, "scale": scale, "window": window, "softcap": softcap}
    out, lse = ops.attention(*given, **limits)
    expected_out, expected_lse = exact(*given, **limits)
    near = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(out, expected_out, **near)
    torch.testing.assert_close(lse, expected_lse, **near)
    torch.testing.assert_close(ops.attention_output(*given, **limits), expected_out, **near)
    out, lse = reference.attention(*given, **limits)
    torch.testing.assert_close(out, expected_out, **near)
    torch.testing.assert_close(lse, expected_lse, **near)


@pytest.mark.parametrize("before", [0, 33])  # pages begin and end within them
def test_keys_of_16_bits_cost_their_rounding_only(before):
    query, key, value = (x.bfloat16() for x in inputs(21, before + 29, (6, 3), (24, 16)))
    limits = {"start": before, "scale": 0.2}
    out, lse = ops.attention(query.float(), key, value, **limits)
    expected_out, expected_lse = exact(query, key, value, **limits)
    near = {"rtol": 0, "check_dtype": False}
    assert out.dtype == torch.float32
    # Weights of 8 bits' precision, which add up to 1, times values.
    torch.testing.assert_close(out, expected_out, atol=float(value.abs().max()) / 2**9, **near)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, **near)


def test_rows_that_see_nothing_give_zero():
    given = inputs(3, 4)
    out, lse = ops.attention(*given, start=8, scale=0.25, window=2)
    assert out.eq(0).all() and lse.isneginf().all()
    assert ops.attention_output(*given, start=8, scale=0.25, window=2).eq(0).all()
    empty = ops.attention(given[0], given[1][:0], given[2][:0], start=0, scale=0.25)
    assert empty[0].eq(0).all() and empty[1].isneginf().all()


def test_huge_scores_stay_finite():
    query, key, value = inputs(2, 6)
    out, lse = ops.attention(query * 1e4, key * 1e4, value, start=4, scale=1.0)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("start", [0, 20])
def test_chunks_of_queries_and_keys_do_not_change_the_result(monkeypatch, window, start):
    given = inputs(30, start + 30)
    limits = {"start": start, "scale": 0.25, "window": window}
    whole = reference.attention(*given, **limits)
    fused = ops.attention_output(*given, **limits)
    monkeypatch.setattr(attention, "ATTENTION_WORKSPACE_BYTES", 4 * 4 * 50 * 4)
    monkeypatch.setattr(attention, "_KEY_BLOCK", 8)
    torch.testing.assert_close(reference.attention(*given, **limits), whole)
    torch.testing.assert_close(ops.attention_output(*given, **limits), fused)


@pytest.mark.parametrize(("queries", "context"), [(12, 12), (1, 30)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_bf16_output_is_as_near_as_that_of_transformers(queries, context, heads):
    given = tuple(x.bfloat16() for x in inputs(queries, context, heads, (64, 64)))
    start = context - queries
    query, key, value = (x.transpose(0, 1)[None] for x in given)
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True)
    theirs = sdpa_attention_forward(module, query, key, value, None, scaling=0.125)[0][0]
    ours = ops.attention_output(*given, start=start, scale=0.125)
    assert ours.dtype == torch.bfloat16
    expected = exact(*given, start=start, scale=0.125)[0]
    assert (ours - expected).abs().max() <= 1.5 * (theirs - expected).abs().max()


def test_softcap_is_that_of_gemma2():
    given = inputs(9, 9)
    query, key, value = (x.transpose(0, 1)[None] for x in given)
    mask = torch.full((9, 9), -math.inf).triu(1)[None, None]
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    theirs, _ = eager_attention_forward(module, query, key, value, mask, scaling=0.25, softcap=3.0)
    ours = ops.attention_output(*given, start=0, scale=0.25, softcap=3.0)
    torch.testing.assert_close(ours, theirs[0])


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_merged_parts_are_the_whole(sizes, dtype):
    context = sum(sizes)
    query, key, value = inputs(3, context)
    parts, begin = [], 0
    for size in sizes:
        only = slice(begin, begin + size)
        # Everything in a part is seen: the queries stand behind it.
        out, lse = reference.attention(query, key[only], value[only], start=context, scale=0.25)
        parts.append((out.to(dtype), lse))
        begin += size
    out, lse = ops.merge_attention(parts)
    expected = exact(query, key, value, start=context, scale=0.25)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-5)


def test_an_empty_part_counts_for_nothing_even_if_it_is_not_a_number():
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    empty = (torch.full_like(out, math.nan), torch.full_like(lse, -math.inf))
    merged = ops.merge_attention([empty, (out, lse), empty])
    torch.testing.assert_close(merged, (out, lse))
    nothing = ops.merge_attention([empty, empty])
    assert nothing[0].eq(0).all() and nothing[1].isneginf().all()


@pytest.mark.parametrize("allowed", [True, False])
def test_plans_are_for_pieces_that_come_again_and_the_setting_stays(allowed):
    lengths = [16, 512, 1000, 1024, 1030, 2048, 4096]
    assert [n for n in lengths if attention._is_planned(n)] == [1024, 2048, 4096]
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        with pytest.raises(KeyError), attention._without_cudnn():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
