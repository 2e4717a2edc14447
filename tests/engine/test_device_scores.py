"""Reference models keep their scores on a GPU, however much of them is on it."""

import json
from pathlib import Path

import pytest

import hmt
from hmt.bench.quality import Extent, evaluate
from hmt.cli.options import embedded_model
from hmt.memory.device import open_device

pytestmark = pytest.mark.gpu

ASSETS = Path(__file__).parents[2] / "assets"
MODELS = {"dense": embedded_model(), "moe": ASSETS / "mini-moe"}
# Answers that hang on a near tie: bfloat16 rounds differently on a GPU.
NEAR_TIES = 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [1.5, 0.6, 0.4])
@pytest.mark.parametrize("kind", list(MODELS))
def test_scores_are_kept_at_every_split(kind: str, share: float) -> None:
    published = json.loads((MODELS[kind] / "quality.json").read_text())
    size = sum(file.stat().st_size for file in MODELS[kind].glob("*.safetensors"))
    device = open_device("cuda:0")
    device.empty_cache()  # as an engine does before it counts
    budget = device.used_bytes() + int(share * size) + (12 << 20)
    text = (ASSETS / "text" / "valid.txt").read_text(encoding="utf-8")
    with hmt.Engine(gpu_memory=budget, host_memory="256MiB", context=2048) as engine:
        model = engine.load_model(MODELS[kind])
        assert model.plan.device.stages
        stays = model.plan.device.reserved["resident"]
        assert (stays < 0.7 * size) == (share < 1), "the smaller ones do not fit"
        found = evaluate(model, model.tokenizer.encode, text, Extent(200, {2048: 8}, 0))
    right, total = published["tasks"]
    assert found.tasks is not None and found.tasks.total == total
    assert abs(found.tasks.right - right) <= NEAR_TIES
    right, total = published["retrieval"]["2048"]
    assert abs(found.retrieval[2048].right - right) <= NEAR_TIES
