"""Images beside a device: who encodes them, in which memory, and captured steps behind them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_idle_unload import wait_for
from test_images import IMAGES, asked, tower_bytes, words
from torch import Tensor
from vision_models import BEGIN, END, IMAGE, file_of, logprobs_of, picture, publish, vision_model

import hmt
from hmt.contracts.plan import Plan
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
GPU: dict[str, Any] = {"gpus": "fake", "gpu_memory": "64MiB"}
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
    """Alone and in batches that change, beside text, begun early or not: the same bits."""
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


def reserved(plan: Plan) -> int:
    """Bytes of the device, without slots of the encoder."""
    return sum(nbytes for what, nbytes in plan.device.reserved.items() if what != "encoder")


def encoder_bytes(model: hmt.LoadedModel) -> tuple[int, int]:
    """Of the device's memory: by the ledger, and in fact."""
    device = model._core.memory.images._tower.device
    return model.summary().device.used_bytes["encoder"], device.used_bytes


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_budgets_of_a_device_change_no_bit_of_images(name: str, folder_of: FolderOf) -> None:
    """All parts of the encoder stay there, or some, or they take turns, or the CPU encodes."""
    options = OPTIONS | GPU | {"speculate": "off", "max_batch": 1, "context": 128}
    found, taken = [], list[int]()
    with hmt.Engine(**options) as engine:
        prepared = engine.load_model(folder_of(name)).prepared
    whole, room = prepared.plan.device.reserved["encoder"], reserved(prepared.plan)
    least = 2 * prepared.demand.vision_slot_bytes
    for slots in (whole, (whole + least) // 2, least, least - 8192):
        budget = int((room + slots) / 0.99) + 2048
        with hmt.Engine(**options | {"gpu_memory": budget}) as engine:
            model = engine.load_model(folder_of(name))
            plan = model.plan
            assert set(range(prepared.demand.spec.layers + 1)) == plan.device.stages
            taken.append(plan.device.reserved.get("encoder", 0))
            found.append(
                [
                    logprobs_of(model.infer(asked(images=images)))
                    for images in (IMAGES, IMAGES[::-1], IMAGES)
                ]
            )
            if slots < least:
                [note] = model.summary().notes
                assert "images are encoded on the CPU" in note and tower_bytes(model)
            else:
                assert encoder_bytes(model) == (taken[-1], taken[-1])
                if slots == whole:
                    assert not tower_bytes(model), "what stays there is not kept in host memory"
    assert taken[0] == whole > taken[1] > taken[2] >= least and taken[3] == 0
    assert all(answers == found[0] for answers in found)
    assert found[0][0] == found[0][2] != found[0][1]


def test_a_device_counts_an_encoder_before_an_image_is_decoded(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | GPU | {"idle_unload": 0.3, "speculate": "off"}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder_of("qwen2_5_vl"))
        whole = model.plan.device.reserved["encoder"]
        model.infer(asked(words(20, 4), ()))
        assert encoder_bytes(model) == (0, 0)
        images, seen = model._core.memory.images, list[int]()

        def pixels(data: bytes) -> Tensor:
            seen.append(model._core.memory._used_on_device()["encoder"])
            return decoded(data)

        decoded = images._decoder.pixels
        monkeypatch.setattr(images._decoder, "pixels", pixels)
        first = logprobs_of(model.infer(asked(images=list(map(file_of, IMAGES)))))
        assert seen == [whole, whole]
        wait_for(lambda: encoder_bytes(model) == (0, 0))
        assert logprobs_of(model.infer(asked())) == first


def test_an_image_too_large_for_a_device_is_encoded_on_the_cpu(folder_of: FolderOf) -> None:
    with hmt.Engine(**OPTIONS, **GPU) as engine:
        model = engine.load_model(folder_of("qwen3_vl"))
        images = model._core.memory.images
        held, tower = images.hold([picture(40, 40, 5)]), images._tower
        [image] = held[0]
        assert tower.encodes_on_device(image)
        on_device = images._account.used_bytes
        there = logprobs_of(model.infer(asked([5, IMAGE, 9], [picture(40, 40, 5)])))
        images._tower = replace(tower, work_bytes=image.device_bytes - 1)
        images._settle("")
        assert images._account.used_bytes == on_device + image.work_bytes
        tower.free()
        images._features.clear()
        here = logprobs_of(model.infer(asked([5, IMAGE, 9], [picture(40, 40, 5)])))
        assert here == there and tower.device.used_bytes == 0 and tower_bytes(model)
        del held
