"""The models that a probe measures with run, each with the kind of layers that it is for."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import KVKind
from hmt.contracts.request import Request
from hmt.engine import Engine
from hmt.engine import probe_models as models

OPTIONS = {"host_memory": "256MiB", "context": 64}


@pytest.mark.parametrize(
    "make",
    [
        models.small_model,
        models.small_experts,
        models.small_latent,
        models.wide_model,
        models.wide_experts,
    ],
)
def test_models_have_the_layers_that_they_are_for(
    make: Callable[[int], AbstractContextManager[Path]],
) -> None:
    with (
        make(models.FEW) as folder,
        Engine(**OPTIONS) as engine,
        engine.load_model(folder) as model,
    ):
        demand = model.prepared.demand
        assert demand.spec.layers == models.FEW
        assert demand.spec.together == (make is not models.small_latent)
        latent = all(layer.kind is KVKind.LATENT for layer in demand.spec.kv)
        assert latent == (make is models.small_latent)
        experts = demand.of_kind(BlockKind.EXPERT)
        assert bool(experts) == (make in (models.small_experts, models.wide_experts))
        if make is models.small_experts:
            assert {block.numbers for block in experts} == {models.EXPERT_BYTES // 2}
        assert len(model.infer(Request(input=[20] * 3, max_new_tokens=2)).token_ids) == 2
    assert not folder.exists()


def test_a_shelf_keeps_what_was_written_until_it_is_closed(tmp_path: Path) -> None:
    shelf, written = models._Shelf(), list[int]()

    @shelf.keeps
    @contextmanager
    def model(layers: int) -> Iterator[Path]:
        written.append(layers)
        folder = tmp_path / str(len(written))
        folder.mkdir()
        yield folder
        folder.rmdir()

    with model(2) as alone:
        assert alone.exists()
    assert not alone.exists(), "nothing is kept without a shelf"
    with shelf.open():
        with model(2) as first, model(3) as other:
            assert first != other
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda n: model(n).__enter__(), [2] * 8)) == {first}
        assert first.exists()
    assert written == [2, 2, 3] and not first.exists() and not other.exists()
    with shelf.open(), model(2) as again:
        assert again != first
