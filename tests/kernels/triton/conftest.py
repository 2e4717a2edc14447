"""Where the tensors of these tests live."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU these are tests of it; it also sees items of other folders."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; else Triton's interpreter takes tensors of the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
