"""Where the tensors of these tests live."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU these are tests of it, and all run; the interpreter takes a second for some.

    It also sees items of other folders.
    """
    mark = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.each_once
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(mark)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; else Triton's interpreter takes tensors of the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
