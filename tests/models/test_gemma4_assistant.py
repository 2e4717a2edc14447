"""Gemma 4's assistant against transformers: its layers on a KV cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_assistant_reference import KINDS, draft, random_assistant, random_gemma4, tensors
from plain_memory import PlainKV, ResidentWeights

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.step import SegmentRequest, Step
from hmt.models import TOKEN_ORDER, open_gemma4_assistant, open_model

VOCAB, COUNT = 120, 17


@pytest.mark.parametrize("clusters", [0, 12])
def test_drafts_are_those_of_transformers(clusters: int, tmp_path: Path) -> None:
    """Three draft tokens behind sequences that are shorter and longer than the window."""
    theirs, made = random_gemma4(VOCAB, 1), random_assistant(VOCAB, 2, clusters=clusters)
    config = theirs.config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    verifier = open_model(config, tmp_path, torch.float32)
    model = open_gemma4_assistant(made.config.to_dict(), tmp_path, torch.float32, verifier.spec)
    lent = ResidentWeights(verifier.spec, tensors(theirs))
    own = tensors(made)
    order = own.pop(TOKEN_ORDER, None)
    if order is not None:
        model.set_order(order)
    weights, kv = ResidentWeights(model.spec, own), PlainKV(verifier.spec)
    assert weights.used == own.keys()
    model.borrow(lent)
    model.lend_kv(kv)
    torch.manual_seed(3)
    ids = torch.randint(8, VOCAB, (COUNT,)).tolist()
    with torch.inference_mode():
        for end in (3, 7, COUNT - 1):
            wanted, tokens, (shared, state) = draft(made, theirs, ids[: end + 1], 3)
            for layer, kind in ((2, KINDS[0]), (3, KINDS[1])):
                kept = (part[0].transpose(0, 1) for part in shared[kind])
                kv.keys[layer, 3], kv.values[layer, 3] = kept
            last = ids[end]
            for row, token in zip(wanted, tokens, strict=True):
                step = replace(Step.build([SegmentRequest(3, end, [last], 1)]), inputs=state)
                x = model.embed(step, weights)
                for index in range(model.spec.layers):
                    x = model.layer(index, x, step, weights, kv)
                logits, state = model.head(x, weights), model.normed(x, weights)
                assert torch.allclose(logits[0], row, atol=1e-5, rtol=1e-5)
                last = token


@pytest.mark.parametrize(
    ("changed", "text", "said"),
    [
        ({"backbone_hidden_size": 32}, {}, "hidden_size 32, and this one, Gemma4ForCausalLM"),
        ({}, {"vocab_size": VOCAB + 1}, "vocab_size 121"),
        ({"text_config": None}, {}, "has no text_config"),
        ({}, {"num_key_value_heads": 1}, "attends in layer 0 to a KV cache like"),
        ({}, {"sliding_window": 9}, "attends in layer 0"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "3 of 7 clusters of 120"),
        ({}, {"layer_types": ["full_attention"]}, "describes no model|layer_types"),
    ],
)
def test_assistants_of_other_models_are_refused(
    changed: dict[str, Any], text: dict[str, Any], said: str
) -> None:
    theirs, made = random_gemma4(VOCAB, 1), random_assistant(VOCAB, 2)
    config = theirs.config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    verifier = open_model(config, Path("it"), torch.float32).spec
    own = made.config.to_dict()
    own = own | {"text_config": own["text_config"] | text} | changed
    with pytest.raises((ConfigError, CheckpointError), match=said):
        open_gemma4_assistant(own, Path("it"), torch.float32, verifier)
