"""Images beside a device: who encodes them, in which memory, and captured steps behind them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from test_images import IMAGES, PROMPT, asked, words
from vision_models import BEGIN, END, IMAGE, logprobs_of, publish, vision_model

import hmt
from hmt.contracts.request import Sampling
from hmt.contracts.step import SchedulerOutput
from hmt.engine.engine_core import EngineCore
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "context": 512, "max_batch": 4, "host_memory": "64MiB",
    "max_prefill_tokens": 16,
}  # fmt: skip
GPU: dict[str, Any] = {"gpu_id": "fake", "gpu_memory": "64MiB"}
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        publish(vision_model(name), folder)
        return folder

    return made


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HMT_POISON", "on")
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))
    yield


def graphs_of(model: hmt.LoadedModel) -> GraphRunner:
    found = model._core.runner.executor.graphs
    assert isinstance(found, GraphRunner), model.summary().notes
    return found


def requests() -> list[hmt.Request]:
    """Images in front, between and at the end, and text; greedy and drawn."""
    ends = [*words(4, 6), BEGIN, IMAGE]  # its last token's positions are no neighbour's
    drawn = Sampling(temperature=1.0, seed=3, logprobs=0)
    return [
        asked(max_new_tokens=24),
        asked(words(21, 5), (), max_new_tokens=30),
        asked(ends, IMAGES[1:], max_new_tokens=19, sampling=drawn),
        asked([IMAGE, END, *words(3, 7)], IMAGES[:1], max_new_tokens=9, sampling=drawn),
        asked(words(1, 8), (), max_new_tokens=12),
    ]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_steps_behind_images_are_captured(
    name: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in batches that change, with text beside them, begun early or not: the same bits."""
    accept, seen = EngineCore._accept, list[Tensor]()

    def watched(self: EngineCore, output: SchedulerOutput, logits: Tensor) -> Any:
        seen.append(logits.clone())
        return accept(self, output, logits)

    monkeypatch.setattr(EngineCore, "_accept", watched)
    steps = []
    for way in ({"executor": "plain"}, {}):
        with hmt.Engine(**OPTIONS, **GPU, **way, speculate="off") as engine:
            model = engine.load_model(folder_of(name))
            for one in requests()[:3]:
                model.infer(one)
            early = 0 if way else graphs_of(model).async_steps.right
            model.infer_batch(requests())
            steps.append(seen.copy())
            seen.clear()
            if not way:
                runner = graphs_of(model)
                assert runner.works and not model.summary().notes
                keys = [key for key, one in runner.graphs[False].items() if one.recorded]
                assert {key.axes for key in keys} == {True, False}
                assert early > 10, "steps are begun on a guess"
    assert len(steps[0]) == len(steps[1]) > 80
    assert all(map(torch.equal, *steps))
