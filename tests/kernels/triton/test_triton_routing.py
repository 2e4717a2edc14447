"""Routing and the search for the likeliest token of Triton against the reference."""

import pytest
import torch

from hmt.kernels import reference

routing = pytest.importorskip("hmt.kernels.triton.moe.router")
sampling = pytest.importorskip("hmt.kernels.triton.elementwise.sampling")

# The interpreter computes with numpy, which warns where a GPU makes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")


def logits(tokens, experts, *, device, ties=False, dtype=torch.float32, seed=0):
    values = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 4
    return (values.round() if ties else values).to(dtype).to(device)


def same(found, wanted):
    assert found[0].dtype is torch.int64 and found[1].dtype is torch.float32
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (60, 4), (5, 5), (1, 1), (256, 8)])
@pytest.mark.parametrize("ties", [False, True])
def test_softmax(device, renormalise, experts, k, ties):
    values = logits(3, experts, device=device, ties=ties)
    found = routing.softmax_topk(values, k, renormalise=renormalise)
    same(found, reference.softmax_topk(values, k, renormalise=renormalise))


def test_softmax_of_odd_numbers(device):
    values = logits(5, 20, device=device, dtype=torch.bfloat16)
    values[0, 3], values[1, 7], values[1, 2] = NAN, INF, -INF
    values[2] = 0.0
    values[2, ::2] = -0.0
    values[3, :18] = -INF
    found = routing.softmax_topk(values[:, :], 6, renormalise=False)
    same(found, reference.softmax_topk(values, 6, renormalise=False))
    columns = logits(4, 40, device=device)[:, 4:24]
    found = routing.softmax_topk(columns, 3, renormalise=True)
    same(found, reference.softmax_topk(columns, 3, renormalise=True))
    none = routing.softmax_topk(values[:0], 6, renormalise=True)
    assert none[0].shape == none[1].shape == (0, 6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("experts", "groups", "kept"), [(160, 8, 3), (64, 4, 4), (12, 3, 1)])
def test_grouped_softmax(device, ties, experts, groups, kept):
    values = logits(4, experts, device=device, ties=ties)
    options = {"groups": groups, "kept_groups": kept, "scale": 2.5}
    found = routing.grouped_softmax_topk(values, 4, **options)
    same(found, reference.grouped_softmax_topk(values, 4, **options))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("experts", "groups", "kept"), [(256, 8, 4), (20, 1, 1), (6, 6, 4)])
def test_biased_sigmoid(device, renormalise, ties, experts, groups, kept):
    values = logits(4, experts, device=device, ties=ties)
    bias = logits(1, experts, device=device, ties=ties, seed=1)[0]
    options = {"groups": groups, "kept_groups": kept, "renormalise": renormalise, "scale": 2.5}
    found = routing.biased_sigmoid_topk(values, bias, 4, **options)
    wanted = reference.biased_sigmoid_topk(values, bias, 4, **options)
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-6, atol=1e-9)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(device, dtype):
    values = logits(3, 9001, device=device, ties=True, dtype=dtype)
    assert sampling.greedy(values).tolist() == [int(row.argmax()) for row in values.cpu()]
    values[0] = -INF
    values[1, 5000], values[1, 8000] = NAN, NAN
    values[2] = 3.0
    assert sampling.greedy(values).tolist() == [0, 5000, 0]
    assert sampling.greedy(values[:0]).shape == (0,)


def test_surveyed_runs_go_on_by_one(device):
    values = logits(3, 9001, device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    positions = torch.tensor([3, 90, 7], device=device)
    spans = torch.arange(9, dtype=torch.int32, device=device).view(3, 3)
    found = sampling.survey_rows(values, (tokens, positions, spans[2]))
    assert torch.equal(found, sampling.survey_rows(values))
    assert tokens.tolist() == [int(row.argmax()) for row in values.cpu()]
    assert positions.tolist() == [4, 91, 8]
    assert spans.tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9]]


def test_survey(device):
    for size in (1.0, 1e4):
        values = logits(1, 5000, device=device)[0] * size
        found, wanted = sampling.logit_stats(values), reference.logit_stats(values)
        assert found.finite and found.best == wanted.best
        assert found.log_sum_exp == pytest.approx(wanted.log_sum_exp, rel=1e-6)
    for bad in (NAN, INF, -INF):
        values[4321] = bad
        assert not sampling.logit_stats(values).finite
