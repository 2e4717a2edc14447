"""Tokens that stop at different depths: against training/recursions.py, and in any chunks."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from plain_memory import Bench
from safetensors.torch import load_file

from hmt.base.errors import CheckpointError, ConfigError
from hmt.models import open_model
from hmt.models.mixture_of_recursions import MixtureOfRecursions

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
import recursions as oracle

VOCABULARY, DEPTH = 96, 0.6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_recursions": 3,
}
TOKENS = random.Random(5).choices(range(8, VOCABULARY), k=48)
Pair = tuple[oracle.MixtureOfRecursions, Path]


@pytest.fixture(scope="module", params=["own", "first"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random model whose thresholds stop about half of the tokens, and its folder."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = oracle.configuration(VOCABULARY, 64, request.param, **SIZES)
    model = oracle.MixtureOfRecursions(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        scores = model.model(torch.tensor([TOKENS])).scores
    config.recursion_thresholds[str(DEPTH)] = scores.flatten(1).quantile(0.5, 1).tolist()
    folder = tmp_path_factory.mktemp(request.param)
    model.save(folder)
    return model, folder


def opened(pair: Pair, depth: float) -> Bench:
    folder = pair[1]
    config = json.loads((folder / "config.json").read_text())
    model = open_model(config, folder, torch.float32)
    assert isinstance(model, MixtureOfRecursions)
    model.set_depth(depth)
    return Bench(model, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("depth", [1.0, DEPTH])
def test_logits_equal_the_oracles_in_any_chunks(pair: Pair, depth: float) -> None:
    model, bench = pair[0], opened(pair, depth)
    thresholds = None if depth == 1 else model.config.recursion_thresholds[str(depth)]
    with torch.inference_mode():
        output = model.model(torch.tensor([TOKENS]), thresholds=thresholds)
        wanted = model.lm_head(output.last_hidden_state[0])
    whole = bench.run((0, 0, TOKENS))
    torch.testing.assert_close(whole, wanted, atol=1e-4, rtol=0)
    assert wanted.std() > 0.2, "these logits would hide errors"
    assert isinstance(bench.model, MixtureOfRecursions)
    assert bench.model.applications.share == pytest.approx(model.applications(output.active))
    assert (bench.model.applications.share < 0.9) == (depth < 1)
    for number, sizes in enumerate(([1] * len(TOKENS), [7, 1, 20, 3, 17]), start=1):
        at = 0
        for size in sizes:
            logits = bench.run((number, at, TOKENS[at : at + size]))
            torch.testing.assert_close(logits, wanted[at : at + size], atol=1e-4, rtol=0)
            at += size


def test_sequences_of_a_step_do_not_see_each_other(pair: Pair) -> None:
    bench = opened(pair, DEPTH)
    alone = bench.run((0, 0, TOKENS))
    bench.run((1, 0, TOKENS[:30]), (2, 0, TOKENS[:5]))
    found = bench.run((1, 30, TOKENS[30:]), (2, 5, TOKENS[5:]))
    torch.testing.assert_close(found[:18], alone[30:], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[18:], alone[5:], atol=1e-4, rtol=0)


def test_the_router_learns_from_tokens_on_both_sides_of_the_threshold(pair: Pair) -> None:
    model = pair[0]
    output = model.model(torch.tensor([TOKENS]), shares=[0.5, 0.5])
    assert output.active.sum((1, 2)).tolist() == [24, 12]
    model.lm_head(output.last_hidden_state).logsumexp(-1).sum().backward()
    gradient = model.model.router.weight.grad
    assert gradient is not None
    assert (gradient.abs().sum(-1) > 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recursion_kv": "none"}, "recursion_kv"),
        ({"num_recursions": 1}, "num_recursions"),
        ({"recursion_layers": 3}, "num_hidden_layers"),
        ({"recursion_thresholds": {"0.5": [0.0]}}, "recursion_thresholds"),
    ],
)
def test_a_config_that_cannot_be(pair: Pair, change: dict, words: str) -> None:
    config = json.loads((pair[1] / "config.json").read_text()) | change
    with pytest.raises(CheckpointError, match=words):
        open_model(config, pair[1], torch.float32)


def test_a_depth_without_thresholds(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"0\.6"):
        opened(pair, 0.5)
