"""The models that a probe measures with run, each with the kind of layers that it is for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Request
from hmt.engine import Engine
from hmt.profiling import probe_models as models

OPTIONS = {"host_memory": "256MiB", "context": 64}


@pytest.mark.parametrize(
    ("make", "experts"),
    [
        (models.small_model, 0),
        (models.wide_model, 0),
        (models.wide_experts, 8),
        (models.dense_model, 0),
        (models.expert_model, 64),
    ],
)
def test_models_have_the_layers_that_they_are_for(
    make: Callable[[int], AbstractContextManager[Path]], experts: int
) -> None:
    with (
        make(models.FEW) as folder,
        Engine(**OPTIONS) as engine,  # type: ignore[arg-type]
        engine.load_model(folder) as model,
    ):
        demand = model.prepared.demand
        assert demand.spec.layers == models.FEW and demand.spec.together
        assert len(demand.of_kind(BlockKind.EXPERT)) == models.FEW * experts
        assert len(model.infer(Request(input=[20] * 3, max_new_tokens=2)).token_ids) == 2
    assert not folder.exists()
