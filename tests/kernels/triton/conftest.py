"""Triton's kernels run on the GPU where there is one, and in Triton's interpreter where not."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of these tests live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
