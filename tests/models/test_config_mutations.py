"""Changed configurations: each is refused with an error of ours, or describes a model of some size.

What is refused costs neither time nor memory: the sizes that a file states are checked before
anything is made of them.
"""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import rounds
from random_configs import cases
from transformers import CONFIG_MAPPING

from hmt.base.errors import CheckpointError, HMTError
from hmt.models import open_model, supported_architectures

PATH = Path("some/where")
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1 << 31, 10**12, 1 << 63, -(1 << 40), 0.0, 0.5, -1.5,
    1e308, float("nan"), float("inf"), "", "x", "silu", "bfloat16", [], [1], [None], ["x"] * 3, {},
    {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, {"": None}, [[[]]],
)  # fmt: skip
SMALL = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OTHERS = {
    "olmo2": "Olmo2ForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def places(config: Any) -> list[tuple[Any, Any]]:
    """Every (dictionary or list, key) in a configuration."""
    keys = list(config) if isinstance(config, dict) else range(len(config))
    found = [(config, key) for key in keys]
    for key in keys:
        if isinstance(config[key], dict | list):
            found += places(config[key])
    return found


def mutated(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with a few fields changed, exchanged or gone."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder, key = rng.choice(places(config))
        kind = rng.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1:
            other, place = rng.choice(places(config))
            holder[key] = copy.deepcopy(other[place])
        elif kind == 2 and type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 5, 1000))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        if not config:
            break
    return config


def check(rng: random.Random, configs: list[dict[str, Any]], count: int) -> None:
    opened = refused = 0
    for number in range(count):
        config = mutated(rng, configs[number % len(configs)])
        try:
            spec = open_model(config, PATH, torch.float32).spec
        except HMTError as error:
            assert len(str(error)) < 2000
            refused += 1
        else:
            opened += 1
            assert len(spec.kv) == spec.layers
            assert all(size > 0 for b in spec.blocks for p in b.params for size in p.shape)
    assert opened > count // 20
    assert refused > count // 20


def test_changed_configurations_of_our_families() -> None:
    configs = []
    for case in cases():
        kind = case.config.model_type.replace("_text", "").replace("_", "")
        wanted = f"{kind}forcausallm"
        names = [n for n in supported_architectures() if n.lower().replace("_", "") == wanted]
        assert names
        configs.append(case.config.to_dict() | {"architectures": names})
    check(random.Random(23), configs, rounds(2000))


@pytest.mark.filterwarnings("ignore")
def test_changed_configurations_of_other_models() -> None:
    configs = [
        CONFIG_MAPPING[kind](**SMALL).to_dict() | {"architectures": [name]}
        for kind, name in OTHERS.items()
    ]
    check(random.Random(29), configs, 60)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_nextn_predict_layers", "num_labels"])
@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM", "Olmo2ForCausalLM"]
)
def test_nothing_is_made_as_often_as_a_file_says(architecture: str, name: str) -> None:
    """Of a file without layer_types transformers makes a list of all layers' types."""
    kind = {"DeepseekV3ForCausalLM": "deepseek_v3"}.get(architecture, architecture[:-11].lower())
    config = {"architectures": [architecture], "model_type": kind, **SMALL, name: 10**12}
    with pytest.raises(CheckpointError, match=f"{name} is 1000000000000; it must be at most 8192"):
        open_model(config, PATH, torch.float32)
