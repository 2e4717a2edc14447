"""Real models in tests: their files where they have been fetched, or a reason to skip."""

from pathlib import Path

import pytest

from hmt_bench.real_models import REAL_MODELS, path_of


def real_model(name: str) -> Path:
    """The file of a real model; skips the test where it has not been fetched."""
    path = path_of(name)
    if path is None:
        pytest.skip(f"{REAL_MODELS[name].title} has not been fetched: scripts/real-models {name}")
    return path
