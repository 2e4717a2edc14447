"""The published mixture of recursions through the engine: mini-mor, at several depths."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE

import hmt
from hmt.base.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
import recursions as oracle

MINI_MOR = Path(__file__).parents[2] / "assets" / "mini-mor"
DEPTHS = [1.0, 0.75, 0.5]
IDS = [16 + (37 * n) % 480 for n in range(70)]
QUESTIONS = ["What is 12 + 30?", "What is 7 + 9?", "Copy the word: lantern"]
WAYS: list[dict[str, Any]] = [
    {"host_memory": "8MiB"},
    {"host_memory": "64MiB", "max_prefill_tokens": 16},
    {"host_memory": "64MiB", "executor": "plain"},
]


def requests() -> list[hmt.Request]:
    return [hmt.Request([{"role": "user", "content": text}], 24) for text in QUESTIONS]


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_way_gives_the_same_bits(depth: float) -> None:
    options = {"context": 256, "depth": depth}
    with hmt.Engine(**options, host_memory="64MiB", speculate="off") as engine:
        model = engine.load_model(MINI_MOR)
        wanted = model.logits(IDS, range(len(IDS)))
        answers = [model.infer(request).token_ids for request in requests()]
        [note] = [note for note in model.summary().notes if "layers on average" in note]
    assert ("100%" in note) == (depth == 1), note
    for way in WAYS:
        with hmt.Engine(**options, **way, prefix_cache=True) as engine:
            model = engine.load_model(MINI_MOR)
            assert torch.equal(model.logits(IDS, range(len(IDS))), wanted), way
            for _ in "ab":  # the second time beginnings are there, and drafts from the first
                found = model.infer_batch(requests())
                assert [one.token_ids for one in found] == answers, way


@pytest.mark.parametrize("depth", DEPTHS)
def test_logits_are_the_oracles(depth: float) -> None:
    model = oracle.MixtureOfRecursions.load(MINI_MOR, torch.float32).eval()
    thresholds = None if depth == 1 else model.config.recursion_thresholds[str(depth)]
    with torch.inference_mode():
        output = model.model(torch.tensor([IDS]), thresholds=thresholds)
        wanted = model.lm_head(output.last_hidden_state[0])
    options: dict[str, Any] = {"context": 256, "host_memory": "128MiB", "depth": depth}
    with hmt.Engine(**options, dtype="float32") as engine:
        found = engine.load_model(MINI_MOR).logits(IDS, range(len(IDS)))
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("path", "depth", "words"),
    [(MINI_DENSE, 0.75, "no mixture of recursions"), (MINI_MOR, 0.33, "0.45, 0.5, 0.55")],
)
def test_a_depth_that_cannot_be(path: Path, depth: float, words: str) -> None:
    with (
        hmt.Engine(host_memory="64MiB", context=256, depth=depth) as engine,
        pytest.raises(ConfigError, match=words),
    ):
        engine.load_model(path)


@pytest.mark.parametrize("depth", [0, 1.5, float("nan")])
def test_a_depth_that_is_no_share(depth: float) -> None:
    with pytest.raises(ConfigError, match="depth"):
        hmt.Engine(host_memory="64MiB", depth=depth)
