"""Packs of models that see: the tower travels as it was published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import after_first
from vision_models import BEGIN, END, IMAGE, picture, publish, vision_model

import hmt
from hmt.base.errors import RequestError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Request, Sampling
from hmt.contracts.step import Step
from hmt.engine import EngineConfig
from hmt.engine.loading import packs
from hmt.engine.loading.inspection import inspect
from hmt.kernels.cpu import extension
from hmt.layers.stack import FusedLayers

IMAGES = (picture(37, 21), picture(18, 50, 1))
PROMPT = [9, 30, BEGIN, IMAGE, END, 77, BEGIN, IMAGE, END, 101]
OPTIONS: dict[str, Any] = {"host_memory": "64MiB", "context": 256, "max_batch": 1}


def answer(
    folder: Path, images: tuple[Any, ...] = IMAGES, **options: Any
) -> list[tuple[int, float]]:
    request = Request(
        input=PROMPT if images else [9, 30, 77],
        images=images,
        max_new_tokens=6,
        ignore_eos=True,
        sampling=Sampling(logprobs=0),
    )
    with hmt.Engine(**OPTIONS, **options) as engine:
        found = engine.load_model(folder).infer(request)
    return [(one.token_id, one.logprob) for one in found.logprobs]


def packed(folder: Path, out: Path, scheme: str | None) -> Any:
    return packs.convert(folder, out, EngineConfig.resolve(quantization=scheme, threads=1))


CASES = {
    "qwen3_vl": ("bfloat16", "w8a8"),
    "llava-siglip": ("float32", None),
    "qwen2_5_vl-tied": ("bfloat16", None),
}


@pytest.mark.parametrize("name", after_first(CASES))
def test_a_pack_answers_as_its_folder(name: str, tmp_path: Path) -> None:
    dtype, scheme = CASES[name]
    folder, pack = tmp_path / "folder", tmp_path / "pack"
    folder.mkdir()
    publish(vision_model(name).to(getattr(torch, dtype)), folder)
    manifest = packed(folder, pack, scheme)
    tower = [block for block in manifest.blocks if block.id.kind is BlockKind.VISION]
    formats = {str(param.format.encoding) for block in tower for param in block.params}
    assert len(tower) > 2 and len(formats) == 1, "as published"
    assert all(param.format == param.published for block in tower for param in block.params)
    assert answer(pack) == answer(folder, quantization=scheme)
    assert not inspect(pack).missing


def test_a_pack_without_its_tower_reads_text_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, pack = tmp_path / "folder", tmp_path / "pack"
    folder.mkdir()
    publish(vision_model("llava"), folder)
    (folder / "preprocessor_config.json").rename(tmp_path / "kept")
    packed(folder, pack, None)
    assert "no encoder of images" in caplog.text and "preprocessor_config" in caplog.text
    assert answer(pack, ()) == answer(folder, ())
    with pytest.raises(RequestError, match=r"pack was made without .*hmt convert"):
        answer(pack)


def test_a_pack_whose_tower_cannot_run_reads_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pack = tmp_path / "folder", tmp_path / "pack"
    folder.mkdir()
    publish(vision_model("llava"), folder)
    packed(folder, pack, None)
    expected = answer(folder, ())

    def absent(*_: Any) -> None:
        raise ImportError("no module of that name")

    monkeypatch.setattr("hmt.models.vision.opening._opened", absent)
    assert answer(pack, ()) == expected
    with pytest.raises(RequestError, match="no module of that name"):
        answer(pack)


@pytest.mark.skipif(extension.load() is None, reason="needs the compiled kernels")
def test_layers_in_one_call_turn_heads_by_three_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled layers compute steps behind images, with the bits of layers one by one."""
    publish(vision_model("qwen2_5_vl").to(torch.bfloat16), tmp_path)
    called, plain = list[int](), FusedLayers.__call__

    def counted(self: FusedLayers, hidden: torch.Tensor, step: Step, *adapters: Any) -> bool:
        done = plain(self, hidden, step, *adapters)
        if done and step.axes is not None:
            called.append(len(hidden))
        return done

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    together = answer(tmp_path, quantization="w8a8")
    assert called, "the compiled layers were asked for no step with three positions"
    one_by_one = answer(tmp_path, quantization="w8a8", executor="plain")
    assert together == one_by_one
