"""Layers that predict one token more, against transformers' MtpLayer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_memory import (
    PlainKV,
    ResidentWeights,
    published,
    random_reference,
    randomise,
)
from random_configs import case_of
from transformers.modeling_layers import MtpLayer

import hmt
from hmt.base.errors import ConfigError
from hmt.cli.options import embedded_model
from hmt.contracts.step import SegmentRequest, Step
from hmt.models import open_predictor

NAMES = ["deepseek_v3-0", "deepseek_v3-1", "glm4_moe-0", "qwen3_next-0", "qwen3_5_text-0"]
NAMES += ["qwen3_5_moe_text-0"]
COUNT = 23


def oracle(name: str) -> tuple[Any, MtpLayer, dict[str, Any], dict[str, torch.Tensor]]:
    """transformers' model, its layer, config.json, and tensors as they are published."""
    case = case_of(name)
    config = case.config
    trunk = random_reference(config, case.seed)
    layers = trunk.get_decoder().layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    number = max(n for n, kind in enumerate(kinds) if kind == "full_attention")
    norm = type(layers[number].input_layernorm)
    layer = MtpLayer(config, type(layers[number]), norm, number).eval()
    randomise(layer, 7)
    first = config.num_hidden_layers
    deepseek = name.startswith(("deepseek", "glm"))
    called = {
        "mtp_block.": f"model.layers.{first}." if deepseek else "mtp.layers.0.",
        "enorm": f"model.layers.{first}.enorm" if deepseek else "mtp.pre_fc_norm_embedding",
        "hnorm": f"model.layers.{first}.hnorm" if deepseek else "mtp.pre_fc_norm_hidden",
        "eh_proj": f"model.layers.{first}.eh_proj" if deepseek else "mtp.fc",
        "post_norm": f"model.layers.{first}.shared_head.norm" if deepseek else "mtp.norm",
    }
    own = {}
    for key, value in layer.state_dict().items():
        [begin] = (begin for begin in called if key.startswith(begin))
        key = called[begin] + key.removeprefix(begin)
        at, stacked, kind = key.partition(".mlp.experts.")
        if not stacked:
            own[key] = value
            continue
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert, rows in enumerate(value):
            for one, part in zip(names, rows.chunk(len(names)), strict=True):
                own[f"{at}.mlp.experts.{expert}.{one}.weight"] = part.contiguous()
    return trunk, layer, {"count": 1} if deepseek else {}, own


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    trunk, layer, said, own = oracle(name)
    config, tensors = published(trunk, tmp_path)
    if said:
        config["num_nextn_predict_layers"] = 1
    torch.manual_seed(1)
    ids = torch.randint(16, 250, (COUNT,))
    hidden = torch.randn(COUNT, trunk.config.hidden_size)
    with torch.no_grad():
        embedded = trunk.get_input_embeddings()(ids[None])
        places = torch.arange(COUNT)[None]
        mask = torch.full((COUNT, COUNT), -torch.inf).triu(1)[None, None]
        turned = trunk.get_decoder().rotary_emb(embedded, places)
        found = layer(embedded, hidden[None], turned, mask, places, None)
        wanted = trunk.lm_head(found)[0]
    model = open_predictor(config, tmp_path, torch.float32)
    assert model is not None and model.spec.layers == 1
    weights, kv = ResidentWeights(model.spec, tensors | own), PlainKV(model.spec)
    assert own.keys() <= weights.used | {k for k in own if "shared_head.head" in k}
    rows = []
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, COUNT)):  # in parts, as they come
            part = SegmentRequest(3, start, ids[start:end].tolist(), end - start)
            built = Step.build([part])
            step = Step(
                built.token_ids, built.positions, built.segments, built.logit_rows,
                inputs=hidden[start:end],
            )  # fmt: skip
            x = model.layer(0, model.embed(step, weights), step, weights, kv)
            rows.append(model.head(x, weights))
    result = torch.cat(rows)
    assert float((result - wanted).norm() / wanted.norm()) < 1e-5


def test_models_without_such_layers_say_so() -> None:
    with pytest.raises(ConfigError, match="no multi-token prediction layers"):
        hmt.Engine(speculate="mtp", host_memory="64MiB").load_model(embedded_model())
