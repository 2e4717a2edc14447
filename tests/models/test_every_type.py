"""Types of transformers beside transformers, or refused with what they have that is not computed.

A subset; `scripts/fallback-table` runs all of them and writes docs/fallback.md.
"""

import re
from pathlib import Path

import pytest
from every_type import outcome_of, types

FOLLOWED = (
    "afmoe", "apertus", "cohere2", "electra, is_decoder", "ernie4_5_moe", "exaone4",
    "gemma4_text, experts", "gemma4_text, large", "glm4_moe", "minimax_m2", "smollm3", "youtu",
)  # fmt: skip
REFUSED = {
    "deepseek_v32": r"attention to \d+ keys that an indexer selects: index_topk",
    "electra": "an encoder .is_decoder is false., whose tokens see those behind them",
    "recurrent_gemma": "a state besides the KV cache",
    "gemma4_text": "a separate embedding for each layer .*hidden_size_per_layer_input",
    "glm_moe_dsa": "an indexer selects",
    "llama4_text": "layers of chunked_attention",
    "rembert": "an encoder",
    "roberta": "an encoder",
    "whisper": "a decoder that attends to sound",
    "mvp": "HMT cannot follow what its Mvp",
    "xlm": "something is computed between its layers",
}
PYTHON = ("Error(", "Traceback", "NoneType", "object has no attribute")


def test_all_types_of_transformers_are_known() -> None:
    assert len(types()) > 190 and {*FOLLOWED, *REFUSED} <= {*types()}


@pytest.mark.parametrize("name", FOLLOWED)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(name, tmp_path / "model")
    assert outcome.kind == "equal", outcome


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_not_computed(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(name, tmp_path / "model")
    assert outcome.kind == "refused", outcome
    assert re.search(REFUSED[name], outcome.reason), outcome.reason
    assert not any(word in outcome.reason for word in PYTHON), outcome.reason
