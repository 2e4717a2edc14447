"""GGUF files whose images are cut into tiles, and videos: text by transformers' processors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mmproj_answers import IMAGES, answer, asked, check_logprobs, spoken
from mmproj_files import write_mmproj, write_text
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from video_models import VIDEO, frames
from vision_families import FAMILIES, family_logits, family_model, publish_family
from vision_models import BEGIN, END, IMAGE, logprobs_of, publish, vision_model

from hmt.base.errors import CheckpointError


def test_idefics3_sees_tiles_and_reads_where_they_were(tmp_path: Path) -> None:
    """transformers' processor writes it, in the tokens of the file's own vocabulary."""
    case = FAMILIES["idefics3"]
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16")
    file = write_text(model, tmp_path / "model.gguf")
    words = [300, 17, IMAGE, 81, 99, 2000, IMAGE, 45]
    whole, got = spoken(file, words)
    check_logprobs(case, model, tmp_path / "folder", whole, got)
    assert spoken(tmp_path / "folder", words)[0] == whole and whole.count(IMAGE) > 9 * 4
    for changed, why in (({"scale": 6}, "scale_factor 6"), ({"longest": 8}, "image_size 8")):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


def test_llava_next_sees_tiles(tmp_path: Path) -> None:
    """Of LLaVA 1.6; its converter calls sizes of images width and height."""
    kind, _, tower, own, processor = FAMILIES["llava_next"]
    points = [[24, 48], [48, 24], [48, 48], [24, 72]]
    own = dict(own) | {"image_grid_pinpoints": points}
    case = (kind, {"model_type": "llama"}, tower, own, processor)
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16")
    file = write_text(model, tmp_path / "model.gguf")
    words = [300, 17, IMAGE, 81, 99, 2000, IMAGE, 45]
    whole, got = spoken(file, words)
    folder = tmp_path / "folder"
    publish_family(case, model, folder)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    images["image_grid_pinpoints"] = points
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    tokens = [*whole, *got.token_ids]
    wanted = family_logits(model, folder, tokens, list(IMAGES)).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(logprobs_of(got)), expected, atol=1e-4, rtol=0)
    for changed, why in (
        ({"merge": "spatial"}, "mm_patch_merge_type 'spatial'"),
        ({"points": [[24, 25]]}, "image_grid_pinpoints"),
        ({"points": [[24 * 9, 24 * 9]]}, "64 tiles of 24"),
    ):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


def test_a_video_is_that_of_the_folder(tmp_path: Path) -> None:
    """Times are written in the tokens of the file's own vocabulary; sizes are as published."""
    model, folder = vision_model("qwen3_vl"), tmp_path / "folder"
    write_mmproj(model, tmp_path / "mmproj-F16.gguf", lambda _: "F16")
    publish(model, folder)
    file = write_text(model, tmp_path / "model.gguf")
    settings = {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824}, "patch_size": 4,
        "image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD,
    }  # fmt: skip
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    asking = replace(asked([300, BEGIN, VIDEO, END, 81], ()), videos=(frames(5, 37, 21, 1),))
    wanted, found = (answer(path, asking) for path in (folder, file))
    assert logprobs_of(found) == logprobs_of(wanted)
    assert found.prompt_tokens > 40
