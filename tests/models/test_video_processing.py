"""Which frames of a video are taken, in which size and patches, beside transformers' processors."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from default_part import rounds
from transformers_videos import video_inputs

from hmt.models.vision import videos

TOWER = SimpleNamespace(patch_size=4, spatial_merge_size=2, temporal_patch_size=2)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def grid_case(rng: random.Random, timed: bool) -> tuple[dict[str, Any], Any]:
    least, most = rng.choice([(256, 4096), (3000, 20000)])
    settings = {
        "size": {"shortest_edge": least, "longest_edge": most}, "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "cap_pixels_per_frame": rng.choice([True, False]), "fps": 2.0,
        "max_frames": rng.choice([768, rng.randrange(4, 30)]),
    }  # fmt: skip
    if timed:
        return settings, videos.TimedGridVideo(settings, 7, TOWER, (4, 5), letters)
    return settings, videos.GridVideo(settings, 7, TOWER)


def square_case(rng: random.Random, kind: str, frames: int) -> tuple[dict[str, Any], Any]:
    settings: dict[str, Any] = {"num_frames": min(rng.randrange(2, 9), frames)}
    settings["size"] = {"height": 24, "width": 24}
    if kind == "internvl":
        return settings, videos.FrameVideo(settings, (7, 6), 24, 9, (4, 5), letters)
    if kind == "llava_next_video":
        settings |= {"crop_size": settings["size"], "do_center_crop": True}
        settings["size"] = {"shortest_edge": rng.choice([24, 31])}
    return settings, videos.SquareVideo(settings, (7, 7), 24, (9, 1))


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen3_vl", "internvl", "llava_onevision", "llava_next_video"]
)
def test_frames_are_prepared_as_transformers_does(kind: str) -> None:
    """To the last bit."""
    rng, generator = random.Random(len(kind)), torch.Generator().manual_seed(len(kind))
    for _ in range(rounds(9)):
        count, height, width = rng.randrange(2, 60), rng.randrange(5, 90), rng.randrange(5, 90)
        fps = rng.choice([1.0, 2.0, 7.5, 10.0, 29.97, 60.0])
        frames = torch.randint(0, 256, (count, height, width, 3), generator=generator).byte()
        timed = kind == "qwen3_vl"
        settings, own = (
            grid_case(rng, timed) if kind.startswith("qwen") else square_case(rng, kind, count)
        )
        wanted = video_inputs(kind, settings, frames, fps, sampled=False)
        chosen = own.choose(count, fps, height, width, sampled=False)
        found = own.made((frames[index] for index in chosen.indices), chosen)
        about = wanted["video_metadata"][0]
        assert [int(index) for index in about.frames_indices] == list(chosen.indices)
        pixels = found.get("pixel_values_videos", found.get("pixel_values"))
        pixels = pixels[None] if kind == "internvl" else pixels
        assert torch.equal(wanted["pixel_values_videos"], pixels), (count, height, width, fps)
        if kind.startswith("qwen"):
            assert torch.equal(wanted["video_grid_thw"], found["image_grid_thw"])
            assert own.grid_s(chosen) == pytest.approx(2 / about.sampled_fps)


def test_one_frame_is_a_video() -> None:
    """It is taken twice, where a patch has two."""
    frame = torch.randint(0, 256, (1, 20, 30, 3)).byte()
    for timed in (False, True):
        _, own = grid_case(random.Random(1), timed)
        chosen = own.choose(1, 10.0, 20, 30, sampled=False)
        patches = own.made(iter(frame), chosen)["pixel_values"].view(-1, 3, 2, 4, 4)
        assert chosen.indices == (0,) and torch.equal(patches[:, :, 0], patches[:, :, 1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"patch_size": 14},
        {"image_std": [0.5, 0.5, 0.0]},
        {"size": {"shortest_edge": 256, "longest_edge": 1 << 40}},
        {"resample": 1},
        {"do_resize": False},
        {"max_frames": "many"},
        {"fps": 0},
    ],
)
def test_what_no_processor_is_is_refused(wrong: dict[str, Any]) -> None:
    settings, _ = grid_case(random.Random(1), timed=False)
    with pytest.raises(ValueError, match="video processor"):
        videos.GridVideo(settings | wrong, 7, TOWER).choose(50, 10.0, 20, 30, sampled=False)
