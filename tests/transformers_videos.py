"""transformers' video processors, by which HMT's are checked, also where torchvision is missing.

They call five functions of it.  These stand in for it here, in torch; all else is transformers'.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import image_processing_backends
from transformers.image_utils import PILImageResampling
from transformers.video_utils import VideoMetadata

_PATH = "torchvision.transforms.v2.functional"


class _Stand(ModuleType):
    """torchvision.transforms.v2.functional, as far as video processors call it."""

    class InterpolationMode:
        """By torch's names."""

        BICUBIC, BILINEAR, LANCZOS = "bicubic", "bilinear", "lanczos"

    @staticmethod
    def resize(image: Tensor, size: Any, interpolation: str, antialias: bool) -> Tensor:
        """uint8 [..., 3, height, width], as torchvision resizes it: by torch, in bytes."""
        flat = image.reshape(-1, *image.shape[-3:])
        if tuple(size) != tuple(image.shape[-2:]):
            flat = functional.interpolate(
                flat, tuple(size), mode=interpolation, antialias=antialias
            )
        return flat.reshape(*image.shape[:-2], *size)

    @staticmethod
    def normalize(image: Tensor, mean: Any, std: Any, inplace: bool) -> Tensor:
        """In f32."""
        mean, std = (torch.as_tensor(one)[:, None, None] for one in (mean, std))
        return image.sub(mean).div(std)

    @staticmethod
    def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
        """A part of an image."""
        return image[..., top : top + height, left : left + width]

    @staticmethod
    def grayscale_to_rgb(image: Tensor) -> Tensor:
        """Tests have colors."""
        return image


@contextmanager
def _torchvision() -> Iterator[None]:
    """Until it ends, transformers finds torchvision, or what stands in for it."""
    if find_spec("torchvision") is not None:
        yield
        return
    stand = _Stand(_PATH)
    names = [_PATH.rsplit(".", n)[0] for n in (3, 2, 1)]
    modules = {name: ModuleType(name) for name in names} | {_PATH: stand}
    for name in (*names[1:], _PATH):
        outer, _, inner = name.rpartition(".")
        setattr(modules[outer], inner, modules[name])
    by_pillow = {PILImageResampling.BICUBIC: "bicubic", PILImageResampling.BILINEAR: "bilinear"}
    with ExitStack() as after:
        for name, module in modules.items():  # what is imported meanwhile stays
            sys.modules[name] = module
            after.callback(sys.modules.pop, name)
        for name, value in (("tvF", stand), ("pil_torch_interpolation_mapping", by_pillow)):
            after.enter_context(patch.object(image_processing_backends, name, value, create=True))
        base = import_module("transformers.video_processing_utils")
        after.enter_context(patch.object(base, "tvF", stand, create=True))
        yield


def video_inputs(
    kind: str, settings: dict[str, Any], frames: Tensor, fps: float, *, sampled: bool
) -> dict[str, Any]:
    """What transformers' processor of `kind` makes of frames, uint8 [frames, height, width, 3].

    sampled   all frames are taken
    The result has "video_metadata" as well.
    """
    name = kind.removesuffix("_moe")
    name = {"qwen2_5_vl": "qwen2_vl", "qwen3_5": "qwen3_vl"}.get(name, name)
    with _torchvision():
        module = import_module(f"transformers.models.{name}.video_processing_{name}")
        processor = getattr(module, module.__all__[0])(**settings)
        made = processor(
            videos=[frames.numpy()],
            video_metadata=[VideoMetadata(total_num_frames=len(frames), fps=fps)],
            do_sample_frames=not sampled,
            return_metadata=True,
            return_tensors="pt",
            input_data_format="channels_last",
        )
    found = dict(made)
    about = found["video_metadata"][0]
    if about.frames_indices is None:
        about.frames_indices = list(range(len(frames)))
    return found
