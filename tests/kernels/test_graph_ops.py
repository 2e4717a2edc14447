"""What captured steps ask of a device, where there is none, or no kernels for it."""

from collections.abc import Iterator

import pytest
import torch

from hmt.kernels import backend_registry, graph_ops, ops
from hmt.kernels.cpu import extension

OWN = {"cpu": backend_registry.make_host_backend, "cuda": backend_registry.make_triton_backend}


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """HMT_KERNELS=reference, for backends that are made in the test."""
    makers = {kind: backend_registry.register(kind, make) for kind, make in OWN.items()}
    assert makers == OWN
    monkeypatch.setenv("HMT_KERNELS", "reference")
    extension.load.cache_clear()
    yield
    extension.load.cache_clear()
    for kind, make in OWN.items():
        backend_registry.register(kind, make)  # forgets the backends that were made


@pytest.mark.usefixtures("without_kernels")
def test_plain_torch_on_a_gpu_has_none_of_it() -> None:
    assert graph_ops.has_kernels(torch.device("cpu"))
    assert not graph_ops.has_kernels(torch.device("cuda"))
    assert graph_ops.fixed_runs(torch.device("cuda"), 1, 16) is None
    assert backend_registry.backend_on(torch.device("cuda")).name == "plain torch"


def test_logits_are_surveyed_as_one_by_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, -3.0], [1.0, torch.nan, 0.0]])
    found = graph_ops.logit_stats_list(graph_ops.logit_stats_of(logits))
    assert [one.best for one in found[:2]] == [1, 0], "the first of equal ones"
    assert [one.finite for one in found] == [True, True, False]
    for one, row in zip(found[:2], logits, strict=False):
        assert one.log_sum_exp == pytest.approx(ops.logit_stats(row).log_sum_exp)


def test_a_step_becomes_the_likeliest_next_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [-1.0, -2.0, -3.0]])
    ids, positions = torch.tensor([7, 7]), torch.tensor([4, 90])
    found = graph_ops.logit_stats_and_next(logits, ids, positions, None)
    assert torch.equal(found, graph_ops.logit_stats_of(logits))
    assert ids.tolist() == [1, 0] and positions.tolist() == [5, 91]
