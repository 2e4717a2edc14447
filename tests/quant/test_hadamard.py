"""Rotations by Hadamard's matrices."""

import pytest
import torch

from hmt.base.errors import ConfigError
from hmt.quant.methods.hadamard import random_rotation


@pytest.mark.parametrize("size", [1, 2, 64, 12, 20, 28, 36, 96, 576, 640, 896, 2880])
def test_rotations_are_orthogonal_and_of_equal_numbers(size):
    rotation = random_rotation(size, 0)
    matrix = rotation(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert (matrix.abs() * size**0.5 - 1).abs().max() < 1e-9


def test_powers_of_two_are_sylvesters_matrix():
    rotation = random_rotation(8, 5)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    expected = torch.kron(step, torch.kron(step, step)) / 8**0.5
    found = rotation(torch.eye(8, dtype=torch.float64))
    assert torch.allclose(found, rotation.signs[:, None] * expected)


def test_a_seed_is_a_rotation():
    rows = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    first, again, other = (random_rotation(64, seed)(rows) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert first.shape == rows.shape
    torch.testing.assert_close(first.norm(dim=-1), rows.norm(dim=-1))


def test_one_large_number_is_spread():
    rows = torch.zeros(1, 96)
    rows[0, 7] = 10
    assert random_rotation(96, 0)(rows).abs().max() < 1.1 * 10 / 96**0.5


def test_sizes_without_a_matrix_are_refused():
    with pytest.raises(ConfigError, match="no Hadamard matrix for vectors of 18"):
        random_rotation(18, 0)
    with pytest.raises(ConfigError, match="vectors of 0"):
        random_rotation(0, 0)
