"""The training code is not part of the package, but it is tested."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
