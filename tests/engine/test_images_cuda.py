"""Images on a real GPU: encoders of all families, their memory, and captured steps behind them."""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vision_families import FAMILIES, family_model, publish_family
from vision_models import CASES, picture, publish, vision_model

import hmt
from hmt.contracts.plan import Tier
from hmt.contracts.request import Sampling
from hmt.contracts.step import SchedulerOutput
from hmt.engine.engine_core import EngineCore
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.memory import Ledger
from hmt.memory.device import Device, open_device
from hmt.weights import DeviceEncoder
from hmt_bench.random_vision import BEGIN, END, IMAGE, SHAPES, written

pytestmark = pytest.mark.gpu

PICTURES = [picture(37, 21), picture(18, 50, 1)]
LARGE = [picture(300, 200), picture(170, 340, 1)]
SMALL = ("qwen2.5-vl-small", "qwen3-vl-small")
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v_moe", "llava", "llava-siglip")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        if name in SHAPES:
            return written(folder, SHAPES[name])
        if name in CASES:
            publish(vision_model(name), folder)
        else:
            publish_family(FAMILIES[name], family_model(FAMILIES[name]), folder)
        return folder

    return made


def features(model: hmt.LoadedModel, keys: list[str], device: Device | None = None) -> list[Tensor]:
    """Rows and those of layers, encoded anew."""
    images = model._core.memory.images
    assert images is not None

    def encode() -> list[Tensor]:
        images._features.clear()
        with nullcontext() if device is None else device.compute_stream():
            found = [images.features(key) for key in keys]
        return [rows for one in found for rows in (one.rows, *one.layers)]

    return model._loop.call(encode)


@pytest.mark.parametrize("name", [*KINDS, *FAMILIES])
def test_a_gpu_encodes_as_the_cpu_does(name: str, folder_of: Any) -> None:
    """With all parts there, and in turns: the same bits; and the CPU's numbers."""
    device = open_device("cuda:0")
    options: dict[str, Any] = {"dtype": "float32", "context": 512, "max_batch": 1}
    with hmt.Engine(host_memory="96MiB", gpu_memory=0, **options) as engine:
        model = engine.load_model(folder_of(name))
        images = model._core.memory.images
        assert images is not None, model.summary().notes
        held, hold = images.hold(PICTURES)
        keys = [one.key for one in held]
        wanted = features(model, keys)
        sizes = [model.prepared.layouts[block].slot_bytes for block in images._tower.blocks]
        whole = sum(-(-size // 256) * 256 for size in sizes)
        found = []
        for nbytes in (whole, min(whole, 2 * -(-max(sizes) // 256) * 256)):
            account = Ledger({Tier.DEVICE: nbytes}).open(Tier.DEVICE, "encoder", nbytes)
            tower = images._tower
            encoder = DeviceEncoder(
                tower.blocks, model.prepared.layouts, tower.weights, device, account
            )
            images._tower = replace(tower, device=encoder, work_bytes=1 << 40)
            found.append(features(model, keys, device))
            assert encoder.used_bytes == account.used_bytes == nbytes
            encoder.free()
            assert encoder.used_bytes == account.used_bytes == 0
            images._tower = tower
        del hold
    for rows, others, expected in zip(*found, wanted, strict=True):
        assert torch.equal(rows, others)
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-3)


def request(images: int, seed: int, tokens: int = 24, **more: Any) -> hmt.Request:
    ids = [16 + (seed + n * 37) % 480 for n in range(20)]
    for number in range(images):
        ids[4 + 6 * number : 4 + 6 * number] = [BEGIN, IMAGE, END]
    return hmt.Request(ids, tokens, images=tuple(LARGE[:images]), ignore_eos=True, **more)


def loaded_bytes() -> int:
    device = open_device("cuda:0")
    device.empty_cache()
    return device.used_bytes()


@pytest.mark.parametrize("name", SMALL)
def test_steps_behind_images_are_captured(
    name: str, folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in batches, with text beside them: the bits of steps that are not."""
    drawn = Sampling(temperature=1.0, seed=3)
    requests = [request(2, 1), request(0, 2, 40), request(1, 3, sampling=drawn), request(1, 4, 9)]
    accept, seen = EngineCore._accept, list[Tensor]()

    def watched(self: EngineCore, output: SchedulerOutput, logits: Tensor) -> Any:
        seen.append(logits.clone())
        return accept(self, output, logits)

    monkeypatch.setattr(EngineCore, "_accept", watched)
    steps, answers = [], []
    for way in ({"executor": "plain"}, {}):
        options: dict[str, Any] = {
            "host_memory": "512MiB",
            "gpu_memory": loaded_bytes() + (2 << 30),
        }
        with hmt.Engine(**options, context=2048, max_batch=4, speculate="off", **way) as engine:
            model = engine.load_model(folder_of(name))
            seen.clear()
            alone = [model.infer(one).token_ids for one in requests[:2]]
            graphs = model._core.runner.executor
            early = 0 if way else graphs.graphs.async_steps.right
            answers.append((alone, [one.token_ids for one in model.infer_batch(requests)]))
            steps.append(seen.copy())
            if not way:
                runner = graphs.graphs
                assert isinstance(runner, GraphRunner) and runner.works, model.summary().notes
                keys = [key for key, one in runner.graphs[False].items() if one.recorded]
                assert {key.axes for key in keys} == {True, False}
                assert early > 10
    assert answers[0] == answers[1]
    assert len(steps[0]) == len(steps[1])
    assert all(map(torch.equal, *steps))


@pytest.mark.parametrize("name", SMALL)
def test_draft_tokens_behind_an_image_change_no_token(name: str, folder_of: Any) -> None:
    answers = []
    for way in ("off", "auto"):
        options: dict[str, Any] = {
            "host_memory": "512MiB",
            "gpu_memory": loaded_bytes() + (2 << 30),
        }
        with hmt.Engine(**options, context=2048, max_batch=1, speculate=way) as engine:
            model = engine.load_model(folder_of(name))
            answers.append(model.infer(request(1, 5, 160)).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", SMALL)
def test_an_encoder_takes_what_the_plan_says_and_goes(name: str, folder_of: Any) -> None:
    """Nothing before an image; with one no more than was reserved; nothing after a while."""
    options: dict[str, Any] = {"host_memory": "1GiB", "gpu_memory": loaded_bytes() + (2 << 30)}
    with hmt.Engine(**options, context=2048, max_batch=1, idle_unload=1.0) as engine:
        model = engine.load_model(folder_of(name))
        share = model.plan.device.reserved
        model.infer(request(0, 1))
        encoder = model._core.memory.images._tower.device
        assert encoder.used_bytes == model.summary().device.used_bytes["encoder"] == 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        features_alone = hmt.Request(
            [5, IMAGE, 9], 1, images=(picture(1024, 1024, 7),), ignore_eos=True
        )
        model.infer(features_alone)
        peak = torch.cuda.max_memory_allocated() - before
        assert encoder.used_bytes == share["encoder"] == model.prepared.demand.vision_bytes
        assert share["encoder"] < peak <= share["encoder"] + share["activations"]
        end = time.monotonic() + 30
        while encoder.used_bytes and time.monotonic() < end:
            time.sleep(0.1)
        assert encoder.used_bytes == model.summary().device.used_bytes["encoder"] == 0
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 4 << 20
        assert model.infer(features_alone).token_ids
