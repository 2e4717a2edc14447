"""The link's share of experts settles where link and CPU are ready at once."""

import pytest
import torch

from hmt.kernels.link_share import LinkShare

LAYERS = 20


def run(planned: float, link: float, cpu: float, steps: int, tokens: int = 1) -> LinkShare:
    """Steps of layers whose missing experts take 1 / link, or 1 / cpu, if one side has them all."""
    share, notes = torch.tensor([planned]), torch.full((LAYERS,), -1, dtype=torch.int32)
    tuned = LinkShare(share, notes)
    for _ in range(steps):
        tuned.begin(tokens)
        brought = float(share)
        uneven = torch.linspace(0.9, 1.1, LAYERS)
        notes.copy_(((1 - brought) / cpu * uneven < brought / link).to(torch.int32))
        tuned.learn()
    return tuned


@pytest.mark.parametrize("link, cpu", [(33, 150), (42, 147), (20, 60), (50, 100)])
@pytest.mark.parametrize("planned", [0.22, 0.3])
def test_both_are_ready_at_once(planned: float, link: float, cpu: float) -> None:
    found = run(planned, link, cpu, steps=60).learned(1)
    assert found == pytest.approx(link / (link + cpu), rel=0.12)


def test_it_stays_near_the_plan() -> None:
    assert run(0.2, link=1000, cpu=1, steps=200).learned(1) == pytest.approx(0.3)
    assert run(0.2, link=1, cpu=1000, steps=200).learned(1) == pytest.approx(0.05)
    assert 0.9 < run(0.9, link=1000, cpu=1, steps=200).learned(1) <= 1.0


def test_steps_of_other_sizes_keep_their_own() -> None:
    share, notes = torch.tensor([0.4]), torch.full((LAYERS,), -1, dtype=torch.int32)
    tuned = LinkShare(share, notes)
    for _ in range(10):
        tuned.begin(1)
        notes.fill_(1)  # the CPU is always first
        tuned.learn()
        tuned.begin(16)
        tuned.learn()
        assert share.item() == pytest.approx(0.4), "no notes were left"
    assert tuned.learned(1) < 0.3
    assert tuned.learned(16) == tuned.learned(99) == pytest.approx(0.4)
