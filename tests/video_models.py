"""Videos for small models that see, and transformers' answers about them."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageSequence
from transformers_videos import video_inputs
from vision_families import FAMILIES, MORE, family_model, publish_family
from vision_models import CASES, IMAGE, picture, publish, vision_model

VIDEO = 7  # the token that stands for one
GRIDS = tuple(name for name in CASES if name.startswith(("qwen2", "qwen3")))
_SQUARE = {"size": {"height": 24, "width": 24}, "num_frames": 4}
_CUT = {
    "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "num_frames": 4,
    "do_center_crop": True,
}  # fmt: skip


def video_model(name: str, folder: Path) -> Any:
    """The model of a case, and what is published of it, with a processor of videos."""
    if name in CASES:
        model = vision_model(name)
        publish(model, folder)
        side = model.config.vision_config.patch_size
        most = 70 if name.startswith("qwen3") else 12  # tokens: of all frames, or of one
        size = {"shortest_edge": 16 * side**2, "longest_edge": most * 4 * side**2}
        settings = {"size": size, "patch_size": side, "merge_size": 2, "fps": 2.0}
    else:
        case = (FAMILIES | MORE)[name]
        model = family_model(case)
        publish_family(case, model, folder)
        settings = _CUT if name.startswith("llava_next") else _SQUARE
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return model


@cache
def frames(count: int, width: int, height: int, seed: int) -> tuple[Image.Image, ...]:
    """Frames of a video."""
    return tuple(picture(width, height, 100 * seed + number) for number in range(count))


def animation(images: Any, duration_ms: Any, kind: str = "GIF", **more: Any) -> bytes:
    """A file in which images move."""
    data = io.BytesIO()
    images[0].save(
        data, kind, save_all=True, append_images=images[1:], duration=duration_ms, **more
    )
    return data.getvalue()


def pixels_of(video: Any) -> torch.Tensor:
    """All frames of an animation or of images: uint8 [frames, height, width, 3]."""
    if isinstance(video, bytes):
        video = [
            f.convert("RGB").copy() for f in ImageSequence.Iterator(Image.open(io.BytesIO(video)))
        ]
    return torch.stack([
        torch.frombuffer(bytearray(f.tobytes()), dtype=torch.uint8).view(f.height, f.width, 3)
        for f in video
    ])  # fmt: skip


def prepared_by_transformers(folder: Path, video: Any, fps: float) -> dict[str, Any]:
    """What transformers' video processor makes of an animation, or of images: all of these."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    if "qwen" in kind:
        settings["cap_pixels_per_frame"] = False  # what is usual, said, so that it does not warn
    return video_inputs(kind, settings, pixels_of(video), fps, sampled=not isinstance(video, bytes))


def video_logits(
    model: Any, folder: Path, tokens: list[int], images: list[Any], videos: list[dict[str, Any]]
) -> torch.Tensor:
    """transformers' logits of `tokens`, in which all is written: f32 [tokens, vocabulary].

    videos   as transformers' processor makes them
    """
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = dict(processor(images=images, return_tensors="pt")) if images else {}
    for name in ("num_patches", "num_crops", "num_soft_tokens_per_image", "rows", "cols"):
        inputs.pop(name, None)
    ids = torch.tensor([tokens])
    kind = model.config.model_type
    for name in ("pixel_values_videos", "video_grid_thw"):
        if name in videos[0]:
            inputs[name] = torch.cat([video[name] for video in videos])
    if "video_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if kind == "qwen2_5_vl":
        rates = [video["video_metadata"][0].sampled_fps for video in videos]
        inputs["second_per_grid_ts"] = torch.tensor([2 / rate for rate in rates])
    if kind == "internvl":  # frames are images, in the order of the prompt: a video is first
        parts = [*inputs.pop("pixel_values_videos")]
        inputs["pixel_values"] = torch.cat([parts[0], inputs["pixel_values"], *parts[1:]])
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, **inputs).logits[0]
    return found
