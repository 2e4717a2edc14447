"""What all tests share: measurements of the machine go to a folder of this run.

Triton's kernels run on the GPU where there is one, and in Triton's interpreter where not; that has
to be said before anything imports triton, and transformers does.
"""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from hmt_bench.real_models import models_folder

pytest_plugins = ["default_part"]

# Nothing is timed: on a busy machine any example may take a second.
settings.register_profile("hmt", deadline=None)
settings.load_profile("hmt")

# What tests share asserts, too: so it does under python -O, and says what was compared.
_SHARED = (file.stem for file in Path(__file__).parent.rglob("*.py"))
pytest.register_assert_rewrite(
    *(n for n in _SHARED if not n.startswith(("test_", "conftest", "__")))
)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from quick_interpreter import make_quick

        make_quick()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real hardware are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: see scripts/gpu-check"))


def pytest_collection_finish() -> None:
    """What was imported stays: Python need not go through it again, which takes 0.3 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or the extension would call leaks what Python does not take down."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    os.environ.setdefault("HMT_MODELS", str(models_folder()))  # real models stay where they are
    before = os.environ.get("HMT_CACHE")
    os.environ["HMT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["HMT_CACHE"]
    else:
        os.environ["HMT_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _no_warming_up() -> Iterator[None]:
    """With a GPU, loads compile what their test calls for alone, not what others might."""
    if not torch.cuda.is_available():
        yield
        return
    from hmt.engine import engine_core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "is_slow_at_first", lambda where: False)
        yield


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[Callable[[], Any]]:
    """Gives the process that forks, which it starts when it is first asked for."""
    from forked_processes import ForkServer

    servers: list[ForkServer] = []

    def started() -> ForkServer:
        if not servers:
            servers.append(ForkServer())
        return servers[0]

    yield started
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def quick_processes(_fork_server: Callable[[], Any]) -> Iterator[None]:
    """Python processes of a module's tests need not import HMT (forked_processes.py)."""
    if torch.cuda.is_available():  # CUDA does not survive a fork
        yield
        return
    from forked_processes import processes_forked_by

    with processes_forked_by(_fork_server()):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models and matrices: torch's threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
