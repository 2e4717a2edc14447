"""EAGLE-3 drafters against plain torch: both layouts of checkpoints, and draft after draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_reference import verifier
from eagle3_reference import LLAMA3, Drafter, random_drafter
from plain_memory import PlainKV, ResidentWeights
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.step import SegmentRequest, Step
from hmt.models import open_eagle3

COUNT, VOCAB, WIDTH = 19, 120, 64
CASES: dict[str, dict[str, Any]] = {
    "as published, other width": {"hidden": 48, "draft_vocab": 40, "rope": LLAMA3},
    "as published, all tokens": {"own_table": False},
    "speculators": {"original": False, "draft_vocab": 50, "said": {"norm_before_residual": True}},
    "speculators, qwen3": {
        "original": False, "family": "qwen3", "layers": 2, "draft_vocab": 33, "own_table": False,
        "said": {"fc_norm": True, "norm_output": True, "attention_bias": True},
    },
    "speculators, four layers": {
        "original": False, "states": 4,
        "said": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [6, 0, 2, 5]},
    },
}  # fmt: skip


def drafter(case: str) -> Drafter:
    made = random_drafter(width=WIDTH, vocab=VOCAB, seed=list(CASES).index(case), **CASES[case])
    if made.layers.get("rope_scaling"):
        config = LlamaConfig(**made.layers)
        made.inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return made


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_definition(case: str, tmp_path: Path) -> None:
    """Tokens of the verifier in parts, then three draft tokens from the drafter's own states."""
    made = drafter(case)
    model = open_eagle3(made.config, tmp_path, torch.float32, verifier(WIDTH, VOCAB))
    assert model.layers == ((0, 2, 5, 6) if "four" in case else (2, 5, 7))
    weights = ResidentWeights(model.spec, made.tensors | made.theirs)
    assert made.tensors.keys() - weights.used <= {"d2t", "t2d"}
    kv = PlainKV(model.spec)
    torch.manual_seed(9)
    ids = torch.randint(0, VOCAB, (COUNT + 3,)).tolist()
    states = torch.randn(COUNT, len(model.layers) * WIDTH)
    before = made.fused(states, len(model.layers))
    parts = [(0, 8, states[:8]), (8, 9, states[8:9]), (9, COUNT, states[9:])]
    with torch.inference_mode():
        for start, end, rows in parts:
            logits, hidden = _step(model, weights, kv, start, ids[start:end], rows)
        for position in range(COUNT, COUNT + 3):
            wanted, theirs = made.forward(ids[:position], before)
            assert torch.allclose(logits[-1], wanted[-1], atol=2e-5, rtol=2e-5)
            assert torch.allclose(hidden[-1], theirs[-1], atol=2e-5, rtol=2e-5)
            before = torch.cat((before, theirs[-1:]))
            rows = hidden[-1:]
            logits, hidden = _step(model, weights, kv, position, ids[position : position + 1], rows)


def _step(
    model: Any, weights: Any, kv: Any, start: int, ids: list[int], inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    built = Step.build([SegmentRequest(3, start, ids, len(ids))])
    step = Step(
        built.token_ids, built.positions, built.segments, built.logit_rows, inputs=inputs.clone()
    )
    x = model.embed(step, weights)
    for index in range(model.spec.layers):
        x = model.layer(index, x, step, weights, kv)
    return model.head(x, weights), model.normed(x, weights)


def _at(layers: list[Any]) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": VOCAB + 1}, "vocab_size 121, and this one, LlamaForCausalLM, has 120"),
        ({"hidden_size": 32}, "hidden_size 32, and this one, LlamaForCausalLM, has 64"),
        (_at([2, 19]), r"\[2, 19\], and .* has 10"),
        (_at(["a"]), "hidden states at layers"),
        ({"eagle_aux_hidden_state_layer_ids": 7}, "hidden states at layers 7, and this model"),
        ({"eagle_config": [1], "model_type": ["llama"]}, "with layers of llama or qwen3"),
        ({"model_type": "mamba"}, "HMT runs EAGLE-3 drafters with layers of llama or qwen3"),
        (_at([2]), "two layers and more"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_drafters_of_other_models_are_refused(changed: dict[str, Any], said: str) -> None:
    made = random_drafter(width=WIDTH, vocab=VOCAB)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        open_eagle3(made.config | changed, Path("it"), torch.float32, verifier(WIDTH, VOCAB))
