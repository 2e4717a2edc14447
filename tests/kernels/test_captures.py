"""What captured steps ask of a device, where there is none, or no kernels for it."""

import pytest
import torch

from hmt.kernels import captures, reference


def test_plain_torch_on_a_gpu_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "gpu_kernels", lambda: reference)
    assert captures.has_kernels(torch.device("cpu"))
    assert not captures.has_kernels(torch.device("cuda"))
    assert captures.fixed_runs(torch.device("cuda"), 1, 16) is None


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, -3.0]])
    assert captures.likeliest(logits).tolist() == [1, 0]
