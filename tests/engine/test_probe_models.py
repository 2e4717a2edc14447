"""The models that a probe measures with run, each with the kind of layers that it is for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
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
