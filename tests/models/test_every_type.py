"""Types of transformers beside transformers, or refused with what they have that is not computed.

A subset; `scripts/fallback-table` runs all of them and writes docs/models.md.
"""

import re
from pathlib import Path

import pytest
from every_type import outcome_of, types

FOLLOWED = (
    "afmoe", "apertus", "cohere2", "electra, is_decoder", "ernie4_5_moe", "exaone4",
    "smollm3", "youtu",
    # As a whole: indexers, chunks, layers that share keys or have embeddings and streams of their
    # own, layers that are called several times or have state, positions behind padding, text parts.
    "axk2, groups", "gemma3n_text", "hrm_text", "lfm3", "llama4_text",
    "longcat_flash", "roberta, is_decoder",
    "glm4v, text part", "llama4, text part",
)  # fmt: skip
OWN = (  # families of HMT's
    "axk2", "deepseek_v32", "deepseek_v4", "gemma4_text", "gemma4_text, experts",
    "gemma4_text, large", "gemma4, text part", "glm4_moe", "glm_moe_dsa", "minimax_m2",
    "qwen4_exp_text", "qwen4_exp, text part", "glm5_next, text part",
)  # fmt: skip
REFUSED = {
    "electra": "an encoder .is_decoder is false., whose tokens see those behind them",
    "musicgen": "an encoder beside its decoder",
    "openai-gpt": "keeps nothing of earlier tokens",
    "recurrent_gemma": "cannot go on with several tokens from what it keeps",
    "rwkv": "keeps nothing of earlier tokens",
    "rembert": "an encoder",
    "roberta": "an encoder",
}
PYTHON = ("Error(", "Traceback", "NoneType", "object has no attribute")


def test_all_types_of_transformers_are_known() -> None:
    assert len(types()) > 190 and {*FOLLOWED, *OWN, *REFUSED} <= {*types()}


@pytest.mark.parametrize("name", (*FOLLOWED, *OWN))
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(name, tmp_path / "model")
    assert outcome.kind == ("family" if name in OWN else "equal"), outcome


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_not_computed(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(name, tmp_path / "model")
    assert outcome.kind == "refused", outcome
    assert re.search(REFUSED[name], outcome.reason), outcome.reason
    assert not any(word in outcome.reason for word in PYTHON), outcome.reason
