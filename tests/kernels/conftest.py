"""What tests of kernels with recurrent state share."""

from collections.abc import Iterator

import pytest
from instruction_sets import SANITIZED, without_tiles

from hmt.kernels import reference
from hmt.kernels.backend_registry import Backend
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.operations import CompiledOperations

native = extension.load()
_WHERE = [] if SANITIZED else ["plain torch"]
_WHERE += without_tiles(native) if native else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The build with sanitizers computes each case of a kernel once; the other one all of them."""
    if SANITIZED:
        for item in items:
            item.add_marker(pytest.mark.each_once)


@pytest.fixture(params=_WHERE)
def kernels(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Plain torch, and the extension on every instruction set."""
    if request.param == "plain torch":
        yield Backend("plain torch", reference, on_host=True)
        return
    assert native is not None
    before = native.isa()
    native.set_isa(request.param)
    yield Backend("compiled", CompiledOperations(native), on_host=True)
    native.set_isa(before)
