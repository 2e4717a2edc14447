"""DFlash drafters against plain torch: both layouts, sequences in parts, all layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import Drafter, random_drafter
from drafter_reference import verifier
from plain_memory import PlainKV, ResidentWeights

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.step import SegmentRequest, Step
from hmt.models import open_dflash
from hmt.models.dflash import DFlash

COUNT, VOCAB, WIDTH = 21, 120, 64
SLIDING = "sliding_attention"
CASES: dict[str, dict[str, Any]] = {
    "speculators": {"layers": 3, "draft_vocab": 50},
    "as published": {"original": True, "states": (1, 4, 8)},
    "windows, as training sees": {"types": [SLIDING, "full_attention"]},
    "windows, both directions": {
        "types": [SLIDING, SLIDING], "said": {"sliding_window_non_causal": True},
    },
    "from the last token on": {"said": {"sample_from_anchor": True, "block_size": 3}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_definition(case: str, tmp_path: Path) -> None:
    """Blocks behind more and more of a text, which take nothing of the blocks before them."""
    made = random_drafter(width=WIDTH, vocab=VOCAB, seed=list(CASES).index(case), **CASES[case])
    model = open_dflash(made.config, tmp_path, torch.float32, verifier(WIDTH, VOCAB))
    assert model.layers == made.states
    asked = model.block
    assert (asked.tokens, asked.mask, asked.first) == (made.block, made.mask, made.first)
    weights = ResidentWeights(model.spec, made.tensors | made.theirs)
    assert made.tensors.keys() - weights.used <= {"d2t", "t2d"}
    kv = PlainKV(model.spec)
    torch.manual_seed(9)
    states = torch.randn(COUNT, len(made.states) * WIDTH)
    with torch.inference_mode():
        _step(model, weights, kv, 0, states[:3], [])
        for start, end in ((3, 8), (8, 9), (9, COUNT)):
            last = 10 + end
            block = [last] + [made.mask] * (made.block - 1)
            logits = _step(model, weights, kv, start, states[start:end], block)
            wanted = made.forward(last, states[:end])
            assert torch.allclose(logits, wanted, atol=1e-5, rtol=1e-5)
            kv.truncate(3, end)


def _step(
    model: DFlash, weights: Any, kv: Any, start: int, states: torch.Tensor, block: list[int]
) -> torch.Tensor:
    """Logits of the block behind the text's tokens from `start` on."""
    tokens, end = len(states), start + len(states)
    blocks = ((end, end + len(block)),) if block else ()
    part = SegmentRequest(3, start, [0] * tokens + block, len(block), blocks=blocks)
    inputs = torch.cat((states, torch.full((len(block), states.shape[1]), torch.nan)))
    step = Step.build([part], inputs=inputs)
    x = model.embed(step, weights)
    for index in range(model.spec.layers):
        x = model.layer(index, x, step, weights, kv)
    return model.head(x[step.logit_rows], weights)


def _changed(made: Drafter, changed: dict[str, Any]) -> dict[str, Any]:
    """The drafter's config.json with other fields, or other ones of its layers."""
    key = "transformer_layer_config"
    layers = {name: value for name, value in changed.items() if name in made.layers}
    config = made.config | {name: value for name, value in changed.items() if name not in layers}
    return config | {key: config[key] | layers} if key in config else config | layers


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": VOCAB + 1}, "vocab_size 121, and this one, LlamaForCausalLM, has 120"),
        ({"hidden_size": 32}, "hidden_size 32, and this one, LlamaForCausalLM, has 64"),
        ({"model_type": "llama"}, "HMT runs DFlash drafters with layers of qwen3"),
        ({"aux_hidden_state_layer_ids": [2, 19]}, r"\[2, 19\], and .* has 10"),
        ({"mask_token_id": None}, "mask_token_id None; it must be one of the 120"),
        ({"mask_token_id": VOCAB}, "mask_token_id 120"),
        ({"block_size": 1}, "block_size 1; HMT drafts blocks of 2 to"),
        ({"layer_types": [SLIDING] * 2, "sliding_window": None}, "sliding_window None"),
    ],
)
def test_drafters_of_other_models_are_refused(changed: dict[str, Any], said: str) -> None:
    made = random_drafter(width=WIDTH, vocab=VOCAB, types=["full_attention"] * 2)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        open_dflash(_changed(made, changed), Path("it"), torch.float32, verifier(WIDTH, VOCAB))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer_types": [SLIDING] * 2}, "in the format of the speculators library only"),
        ({"dflash_config": None}, "has no dflash_config"),
        ({"dflash_config": {"mask_token_id": 7}}, "target_layer_ids None"),
    ],
)
def test_what_the_authors_format_lacks_is_refused(changed: dict[str, Any], said: str) -> None:
    made = random_drafter(width=WIDTH, vocab=VOCAB, original=True)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        open_dflash(made.config | changed, Path("it"), torch.float32, verifier(WIDTH, VOCAB))
