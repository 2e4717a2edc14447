"""Where the tensors of these tests live."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; else Triton's interpreter takes tensors of the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
