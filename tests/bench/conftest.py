"""The training code is not part of the package, but it is tested."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Of all benchmarks, whose models are small."""
