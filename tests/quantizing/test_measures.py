"""Measures of sensitivity, beside numpy and a singular value decomposition."""

import numpy as np
import pytest
import torch

from hmt.quantizing.measures import SampledInputs, divergence, energy, spread

NOISE = torch.Generator().manual_seed(4)


def test_the_energy_is_that_of_the_largest_singular_value():
    weight = torch.randn(40, 60, generator=NOISE)
    weight += 3 * torch.outer(torch.randn(40, generator=NOISE), torch.randn(60, generator=NOISE))
    values = torch.linalg.svdvals(weight.double()).square()
    assert energy(weight) == pytest.approx(float(values[0] / values.sum()), rel=1e-4)
    assert energy(torch.outer(weight[:, 0], weight[0])) == pytest.approx(1, rel=1e-5)
    assert energy(torch.zeros(3, 4)) == 0


def test_the_spread_is_the_range_over_that_of_the_quartiles():
    outputs = torch.randn(300, 7, generator=NOISE)
    low, high = np.quantile(outputs.numpy(), (0.25, 0.75))
    expected = (outputs.amax() - outputs.amin()) / (high - low)
    assert spread(outputs) == pytest.approx(float(expected), rel=1e-5)
    outputs[3, 2] = 1e3
    assert spread(outputs) > 500
    assert spread(torch.ones(4, 4)) == 0


def test_distributions_that_move_apart_diverge_more():
    before = torch.randn(2000, 12, generator=NOISE)
    assert divergence(before, before) == 0
    found = [divergence(before, before + shift) for shift in (0.05, 0.2, 0.8)]
    assert 0 < found[0] < 0.02 < found[1] < found[2]
    # Of normal distributions with deviation 1 it is half the squared distance.
    assert found[1] == pytest.approx(0.02, rel=0.4)
    assert divergence(torch.ones(50, 3), torch.ones(50, 3)) == 0


def test_sampled_rows_come_from_all_that_was_given():
    sampled = SampledInputs(2, shares=4, where=torch.device("cpu"))
    for call in range(4):
        sampled.add(torch.arange(2000.0)[:, None].expand(-1, 2) + 2000 * call)
    rows = sampled.rows()[:, 0]
    assert sampled.tokens == 8000 and len(rows) == 2048
    assert (rows.diff() > 0).all() and rows.diff().max() < 8
