"""Choosing experts: the extension against the reference, and the reference against topk."""

import math

import pytest
import torch
from instruction_sets import without_tiles

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension

native = extension.load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (2, 1), (7, 3), (8, 8), (60, 4), (64, 6), (128, 8), (255, 16), (384, 17)]
GROUPED = [(1, 1, 4, 4), (2, 1, 3, 2), (4, 2, 2, 4), (8, 4, 32, 8), (5, 5, 6, 11), (8, 3, 1, 3)]


@pytest.fixture(params=without_tiles(native) if native else ["reference"], autouse=True)
def isa(request):
    if native is None:
        yield
        return
    before = native.isa()
    native.set_isa(request.param)
    yield
    native.set_isa(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_routed(found, expected):
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-30, equal_nan=True)


def hard_rows(experts: int) -> torch.Tensor:
    """Ties, huge and tiny logits, infinities, NaN."""
    rows = random(12, experts, seed=experts) * 4
    rows[1] = 0
    rows[2] = rows[2].round()
    rows[3] = rows[3].round() * 1e4
    rows[4] *= 1e-30
    rows[5] = -math.inf
    rows[6, experts // 2] = -math.inf
    rows[7, 0] = math.inf
    rows[8, -1] = math.nan
    rows[9] = torch.where(rows[9] > 0, 0.0, -0.0)
    rows[10] = math.nan
    rows[11] = rows[11].sign() * 3e38
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "k"), SHAPES)
def test_softmax(dtype, renormalise, experts, k):
    logits = hard_rows(experts).to(dtype)
    found = ops.softmax_topk(logits, k, renormalise=renormalise)
    assert_routed(found, reference.softmax_topk(logits, k, renormalise=renormalise))
    for row in range(len(logits)):
        alone = ops.softmax_topk(logits[row : row + 1], k, renormalise=renormalise)
        assert torch.equal(alone[0][0], found[0][row])
        assert torch.equal(alone[1][0].nan_to_num(7), found[1][row].nan_to_num(7))
    wide = torch.cat((logits, logits), dim=1)[:, :experts]
    assert_routed(ops.softmax_topk(wide, k, renormalise=renormalise), found)


@pytest.mark.parametrize(("groups", "kept", "width", "k"), GROUPED)
def test_grouped_softmax(groups, kept, width, k):
    logits = hard_rows(groups * width)[[0, 1, 2, 3, 4, 9, 11]]
    how = {"groups": groups, "kept_groups": kept, "scale": 2.5}
    found = ops.grouped_softmax_topk(logits, k, **how)
    assert_routed(found, reference.grouped_softmax_topk(logits, k, **how))


@pytest.mark.parametrize(("groups", "kept", "width", "k"), GROUPED)
@pytest.mark.parametrize("renormalise", [False, True])
def test_biased_sigmoid(groups, kept, width, k, renormalise):
    experts = groups * width
    logits = hard_rows(experts)[[0, 1, 2, 5, 9, 11]]
    how = {"groups": groups, "kept_groups": kept, "scale": 2.5, "renormalise": renormalise}
    for bias in (torch.zeros(experts), random(experts, seed=1).round(), random(experts, seed=2)):
        found = ops.biased_sigmoid_topk(logits, bias, k, **how)
        assert_routed(found, reference.biased_sigmoid_topk(logits, bias, k, **how))


def test_a_row_that_is_no_number_still_names_experts_that_exist():
    logits = torch.full((3, 16), math.nan)
    logits[1, 3], logits[2] = 1.0, math.inf
    how = {"groups": 4, "kept_groups": 2, "scale": 1.0}
    for experts, scales in (
        ops.softmax_topk(logits, 4, renormalise=True),
        ops.grouped_softmax_topk(logits, 4, **how),
        ops.biased_sigmoid_topk(logits, torch.zeros(16), 4, **how, renormalise=True),
    ):
        assert (experts >= 0).all() and (experts < 16).all() and scales[0].isnan().all()
        assert all(row.unique().numel() == 4 for row in experts)


def test_the_reference_chooses_what_topk_does():
    logits = random(40, 64, seed=3)
    experts, scales = reference.softmax_topk(logits, 6, renormalise=False)
    wanted = logits.double().softmax(-1).topk(6)
    assert torch.equal(experts, wanted.indices)
    torch.testing.assert_close(scales.double(), wanted.values)
    tied = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert reference.softmax_topk(tied, 4, renormalise=False)[0].tolist() == [[1, 2, 4, 0]]


@pytest.mark.skipif(native is None, reason="the extension was not built")
def test_results_do_not_depend_on_the_number_of_threads():
    logits, before, pool = random(700, 128), torch.get_num_threads(), native.threads()
    results = []
    try:
        for threads in (1, 2):
            native.set_threads(threads)
            torch.set_num_threads(threads)
            results.append(ops.softmax_topk(logits, 8, renormalise=True))
    finally:
        native.set_threads(pool)
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_no_tokens():
    experts, scales = ops.softmax_topk(torch.empty(0, 8), 2, renormalise=True)
    assert experts.shape == scales.shape == (0, 2)
