"""What layers cost one by one: the models that tell it run, and their differences are the rates."""

import json
from pathlib import Path

import pytest
from hmt.engine.layer_rates import FEW, LayerRates, layer_rates

from hmt.contracts.request import Request
from hmt.engine import Engine

STEP_S = 1.0
LAYER_S = {"llama": 0.25, "qwen3_moe": 0.75, "deepseek_v3": 1.25}


def test_rates_are_what_a_layer_more_takes_of_each_kind() -> None:
    seen = []

    def beyond_s(folder: Path) -> float:
        config = json.loads((folder / "config.json").read_text())
        family, layers = config["model_type"], config["num_hidden_layers"]
        seen.append(family)
        if layers == FEW:
            options = {"host_memory": "256MiB", "context": 64, "executor": "plain"}
            with Engine(**options) as engine, engine.load_model(folder) as model:
                spec = model.prepared.model.spec
                assert spec.together == (family != "deepseek_v3")
                assert len(model.infer(Request(input=[20] * 3, max_new_tokens=2)).token_ids) == 2
        return STEP_S + layers * LAYER_S.get(family, LAYER_S["llama"])

    found = layer_rates(beyond_s)
    assert len(seen) == 6
    assert found == LayerRates(pytest.approx(0.25), pytest.approx(0.5), pytest.approx(1.0))
