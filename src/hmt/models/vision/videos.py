"""Videos as a tower takes them: which frames, how large, and what a prompt has in their place.

As transformers' video processors do it, which need torchvision; what they compute is computed here
with torch alone.  Files are sampled also where a processor says that it samples nothing, which
leaves that to whoever calls it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hmt.contracts.image import ChosenFrames
from hmt.text.small_file import read_object

MOST_FRAMES: Final = 1024  # that are encoded of one video
_USUAL_FPS: Final = 2.0  # of Qwen's processors, and of what was published with their models
_USUAL_FRAMES: Final = 8  # of types that are given as many as their user likes
_MOST_SIDE: Final = 1 << 14
_MOST_RATIO: Final = 200  # of a frame's sides, that Qwen's processors resize
# By torch's names for Pillow's numbers.
_MODES: Final = {2: "bilinear", 3: "bicubic"}
OF_VIDEOS: Final = ("processor_config.json", "video_preprocessor_config.json")
GRIDS: Final = ("qwen2_vl", "qwen2_5_vl")
TIMED: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SQUARES: Final = ("internvl", "llava_onevision", "llava_next_video")
_NUMBERED: Final = ("internvl",)  # of them, whose frames have their numbers in front
_CLIP: Final = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF: Final = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


class VideoProcessing:
    """Frames of one size, each resized and its colors scaled.

    mark    token that stands for a video in a prompt as it is given
    token   that stands for one row of its features
    """

    def __init__(self, settings: Mapping[str, Any], mark: int, token: int) -> None:
        """`settings`: fields of a video processor.  Raises ValueError for what it cannot be."""
        self.mark, self.token = mark, token
        self._settings = settings
        mean, std = (np.asarray(settings[n], np.float64) for n in ("image_mean", "image_std"))
        scale = float(settings.get("rescale_factor", 1 / 255))
        if mean.shape != (3,) or std.shape != (3,) or not (std > 0).all() or not scale > 0:
            raise ValueError("its video processor's image_mean and image_std are not three each")
        if not all(settings.get(n, True) for n in ("do_resize", "do_rescale", "do_normalize")):
            raise ValueError("its video processor leaves frames as they are")
        self._mode = _MODES.get(settings.get("resample", 3))
        if self._mode is None:
            raise ValueError(f"its video processor resizes by {settings.get('resample')}")
        # In f32 as transformers has them, which joins both steps.
        self._mean = torch.tensor(mean.astype(np.float32)).mul(1 / scale)[:, None, None]
        self._std = torch.tensor(std.astype(np.float32)).mul(1 / scale)[:, None, None]

    @property
    def described(self) -> bytes:
        """What decides how frames become what is encoded."""
        return json.dumps([type(self).__name__, *sorted(self._settings.items())]).encode()

    def choose(
        self, frames: int, fps: float, height: int, width: int, *, sampled: bool
    ) -> ChosenFrames:
        """Which frames are taken, and as how large; see ImageEncoder."""
        indices = range(frames) if sampled else self._sampled(frames, fps)
        if len(indices) > MOST_FRAMES:
            raise ValueError(
                f"{len(indices)} frames of it would be taken; the most is {MOST_FRAMES}"
            )
        size = self._size(len(indices), height, width)
        return ChosenFrames(tuple(map(int, indices)), frames, fps, *size)

    def made(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> dict[str, Tensor]:
        """What a tower takes, of frames as uint8 [height, width, 3]."""
        raise NotImplementedError

    def written(self, rows: int, chosen: ChosenFrames) -> list[int]:
        """Tokens in the place of a video that has so many `rows`."""
        return [self.token] * rows

    def grid_s(self, chosen: ChosenFrames) -> float:
        """Seconds between rows of a grid in time."""
        return 0.0

    def _sampled(self, frames: int, fps: float) -> Sequence[int]:
        raise NotImplementedError

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        raise NotImplementedError

    def _scaled(self, frame: Tensor, height: int, width: int) -> Tensor:
        """A frame resized, in bytes as torchvision does it, and its colors: f32 [3, h, w]."""
        pixels = frame.permute(2, 0, 1)[None]
        if pixels.shape[2:] != (height, width):
            assert self._mode is not None
            pixels = functional.interpolate(
                pixels, (height, width), mode=self._mode, antialias=True
            )
        return pixels[0].to(torch.float32).sub_(self._mean).div_(self._std)

    def _number(self, name: str, least: float = 1, most: float = 1 << 28) -> Any:
        """A number among the settings, or None.  Raises ValueError for what it cannot be."""
        value = self._settings.get(name)
        if value is not None and not (isinstance(value, int | float) and least <= value <= most):
            raise ValueError(f"{name} of its video processor is {value!r:.40}")
        return value


class GridVideo(VideoProcessing):
    """Patches of several frames each, as Qwen2-VL's and Qwen2.5-VL's."""

    _defaults: Mapping[str, Any] = {
        "min_frames": 4, "max_frames": 768, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "max_video_tokens": 128000,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": _CLIP[0], "image_std": _CLIP[1],
    }  # fmt: skip

    def __init__(self, settings: Mapping[str, Any], mark: int, vision: Any) -> None:
        """`vision` is transformers' config of the tower."""
        given = {n: v for n, v in settings.items() if v is not None}
        size = dict(given.get("size") or self._defaults["size"])
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            size[new] = given.get(old) or size.get(new)
        super().__init__({**self._defaults, **given, "size": size}, mark, mark)
        self._patch, self._merge = vision.patch_size, vision.spatial_merge_size
        self._depth = vision.temporal_patch_size
        for name, wanted in (
            ("patch_size", self._patch), ("merge_size", self._merge),
            ("temporal_patch_size", self._depth),
        ):  # fmt: skip
            if self._settings[name] != wanted:
                raise ValueError(f"{name} of its video processor is not {wanted}")
        self._least, self._most = size["shortest_edge"], size["longest_edge"]
        for value in (self._least, self._most):
            if not (isinstance(value, int) and 0 < value <= _MOST_SIDE**2):
                raise ValueError(f"its video processor makes frames of {value!r:.40} pixels")
        for name in ("min_frames", "max_frames", "max_video_tokens"):
            self._number(name)

    def made(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> dict[str, Tensor]:
        """See VideoProcessing."""
        patch, merge, depth = self._patch, self._merge, self._depth
        high, wide = chosen.height // patch, chosen.width // patch
        times = -(-len(chosen.indices) // depth)
        # Rows of patches that become one token lie beside each other.
        cut = (high // merge, merge, patch, wide // merge, merge, patch)
        out = torch.empty(times, *cut[0::3], merge, merge, 3, depth, patch, patch)
        number, scaled = 0, torch.empty(0)
        for frame in frames:
            scaled = self._scaled(frame, chosen.height, chosen.width)
            # To [rows, columns, merge, merge, 3, patch, patch].
            patches = scaled.view(3, *cut).permute(1, 4, 2, 5, 0, 3, 6)
            out[number // depth, ..., number % depth, :, :] = patches
            number += 1
        for place in range(number % depth or depth, depth):  # the last frame stays
            out[-1, ..., place, :, :] = out[-1, ..., place - 1, :, :]
        return {
            "pixel_values": out.view(times * high * wide, -1),
            "image_grid_thw": torch.tensor([[times, high, wide]]),
        }

    def grid_s(self, chosen: ChosenFrames) -> float:
        """See VideoProcessing."""
        return self._depth / (len(chosen.indices) / chosen.frames * chosen.fps)

    def _sampled(self, frames: int, fps: float) -> Sequence[int]:
        """As many as come in `fps`, a multiple of a patch's frames, evenly."""
        count, depth = self._number("num_frames"), self._depth
        if count is not None:
            count = min(round(count / depth), frames // depth) * depth
        else:
            wanted = frames / fps * (self._number("fps", 0.001) or _USUAL_FPS)
            most = min(self._settings["max_frames"], frames) // depth * depth
            count = math.floor(min(max(wanted, self._settings["min_frames"]), most) / depth) * depth
        if not count:
            return range(frames)
        return torch.arange(0, frames, frames / count).int().tolist()  # type: ignore[no-any-return]

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        factor, most = self._patch * self._merge, self._most
        if self._settings.get("cap_pixels_per_frame"):
            all_pixels = int(self._settings["max_video_tokens"] * factor * factor * 0.9)
            most = max(min(most, all_pixels * self._depth // count), int(self._least * 1.05))
        return _fitted((height, width), factor, self._least, most)


class TimedGridVideo(GridVideo):
    """Those with their times written in front of each, as Qwen3-VL's."""

    _defaults: Mapping[str, Any] = {
        **GridVideo._defaults,
        "patch_size": 16, "max_video_tokens": 768,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": _HALF[0], "image_std": _HALF[1], "fps": _USUAL_FPS,
    }  # fmt: skip

    def __init__(
        self,
        settings: Mapping[str, Any],
        mark: int,
        vision: Any,
        around: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`around` are tokens in front of and behind each patch in time; `encode` makes tokens."""
        super().__init__(settings, mark, vision)
        self._around, self._encode = around, encode

    def written(self, rows: int, chosen: ChosenFrames) -> list[int]:
        """See VideoProcessing.

        The time of several frames is between those of the first and of the last.
        """
        depth, indices = self._depth, chosen.indices
        front, behind = self._around
        times = -(-len(indices) // depth)
        tokens = list[int]()
        for begin in range(0, len(indices), depth):
            last = indices[min(begin + depth, len(indices)) - 1]
            seconds = (indices[begin] / chosen.fps + last / chosen.fps) / 2
            own = [self.token] * (rows // times)
            tokens += [*self._encode(f"<{seconds:.1f} seconds>"), front, *own, behind]
        return tokens

    def _sampled(self, frames: int, fps: float) -> Sequence[int]:
        count, least = self._number("num_frames"), self._settings["min_frames"]
        if count is None:
            wanted = int(frames / fps * self._number("fps", 0.001))
            count = min(max(wanted, least), self._settings["max_frames"], frames)
        chosen: list[int] = np.linspace(0, frames - 1, min(count, MOST_FRAMES)).round().tolist()
        return chosen

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        factor, most, count = self._patch * self._merge, self._most, max(count, self._depth)
        if self._settings.get("cap_pixels_per_frame"):
            own = min(self._settings["max_video_tokens"] * factor * factor, most // count)
            most = max(own, int(self._least * 1.05)) * count
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        whole = round(count / self._depth) * self._depth
        return _fitted((height, width), factor, self._least, most, count, whole)


class SquareVideo(VideoProcessing):
    """Frames of one size each, as the towers of LLaVA and InternVL take them."""

    _defaults: Mapping[str, Any] = {
        "size": {"height": 384, "width": 384}, "image_mean": _CLIP[0], "image_std": _CLIP[1],
    }  # fmt: skip

    def __init__(
        self,
        settings: Mapping[str, Any],
        marks: tuple[int, int],
        side: int,
        rows: tuple[int, int],
        *,
        middles: bool = False,
    ) -> None:
        """The tower's images have `side` pixels in each direction.

        marks     the tokens that stand for a video, and for a row of its features
        rows      of features that each frame has, and that are behind all
        middles   frames are sampled from within parts of the video, not where they begin
        """
        given = {n: v for n, v in settings.items() if v is not None}
        super().__init__({**self._defaults, **given}, *marks)
        self._side, self._rows, self._middles = side, rows, middles
        size = self._settings["size"]
        self._short = size.get("shortest_edge")
        cut = self._settings.get("crop_size") if self._settings.get("do_center_crop") else None
        made = cut or size
        if (made.get("height"), made.get("width")) != (side, side) or not (
            self._short is None or (isinstance(self._short, int) and side <= self._short <= 1024)
        ):
            raise ValueError(f"its video processor makes frames of {made}, not of {side} x {side}")
        self._number("num_frames")

    def _sampled(self, frames: int, fps: float) -> Sequence[int]:
        count, own = self._number("num_frames"), self._number("fps", 0.001)
        if count is None:
            count = _USUAL_FRAMES if own is None else int(frames / fps * own)
        count = min(max(int(count), 1), frames)
        if not self._middles:
            return [number * frames // count for number in range(count)]
        shift = self._settings.get("initial_shift", True)
        begin = frames / count / 2 if shift is True else float(shift)
        if not 0 <= begin < frames:
            raise ValueError(f"initial_shift of its video processor is {shift}")
        return torch.arange(begin, frames, frames / count).int().tolist()  # type: ignore[no-any-return]

    def made(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> dict[str, Tensor]:
        """See VideoProcessing: f32 [1, frames, 3, side, side]."""
        side = self._side
        top, left = ((size - side) // 2 for size in (chosen.height, chosen.width))
        out = torch.empty(1, len(chosen.indices), 3, side, side)
        for place, frame in zip(out[0], frames, strict=True):
            scaled = self._scaled(frame, chosen.height, chosen.width)
            place.copy_(scaled[:, top : top + side, left : left + side])
        return {"pixel_values_videos": out}

    def written(self, rows: int, chosen: ChosenFrames) -> list[int]:
        """See VideoProcessing."""
        each, more = self._rows
        return [self.token] * (each * len(chosen.indices) + more)

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        if self._short is None:
            return self._side, self._side
        least = min(height, width)
        if max(height, width) > _MOST_RATIO * least:
            raise ValueError(f"a side of its frames is more than {_MOST_RATIO} times the other")
        return int(self._short * height / least), int(self._short * width / least)


class FrameVideo(SquareVideo):
    """Frames that are images to the tower, with their numbers written in front, as InternVL's."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        marks: tuple[int, int],
        side: int,
        rows: int,
        around: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """As SquareVideo and TimedGridVideo."""
        super().__init__(settings, marks, side, (rows, 0), middles=True)
        self._around, self._encode = around, encode

    def made(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> dict[str, Tensor]:
        """See VideoProcessing: f32 [frames, 3, side, side]."""
        return {"pixel_values": super().made(frames, chosen)["pixel_values_videos"][0]}

    def written(self, rows: int, chosen: ChosenFrames) -> list[int]:
        """See VideoProcessing."""
        front, behind = self._around
        tokens = list[int]()
        for number in range(len(chosen.indices)):
            line = "\n" if number else ""
            own = [self.token] * self._rows[0]
            tokens += [*self._encode(f"{line}Frame{number + 1}: "), front, *own, behind]
        return tokens


def _fitted(
    sides: tuple[int, int], factor: int, least: int, most: int, frames: int = 1, whole: int = 1
) -> tuple[int, int]:
    """Sides of a frame in multiples of `factor`, all frames having from `least` to `most` pixels.

    whole   frames that are counted where sides are only rounded
    """
    if max(sides) > _MOST_RATIO * min(sides):
        raise ValueError(f"a side of its frames is more than {_MOST_RATIO} times the other")
    height, width = (round(side / factor) * factor for side in sides)
    pixels = frames * sides[0] * sides[1]
    if whole * height * width > most:
        scale = math.sqrt(pixels / most)
        height, width = (max(factor, math.floor(s / scale / factor) * factor) for s in sides)
    elif whole * height * width < least:
        scale = math.sqrt(least / pixels)
        height, width = (math.ceil(side * scale / factor) * factor for side in sides)
    return height, width


def video_processing(
    config: Any, folder: Path, token: int, tokenizer: Callable[[], Any] | None
) -> VideoProcessing:
    """What prepares videos for a model.

    config      transformers', of the whole model
    folder      with the file of its video processor
    token       that stands for a row of an image's features
    tokenizer   gives a ProcessorTokenizer, and is asked when it is needed; None: there is none
    Raises errors of many kinds where it takes no videos here, or files are not what they should be.
    """
    kind, vision, settings = config.model_type, config.vision_config, settings_in(folder)
    named = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    mark = next((number for number in named if isinstance(number, int)), None)
    if kind not in GRIDS + TIMED + SQUARES:
        raise LookupError(f"HMT has none for models of type {kind!r:.60}")

    def texts() -> Any:
        if tokenizer is None:
            raise LookupError("text between frames needs a tokenizer")
        return tokenizer()

    if kind in _NUMBERED:
        mark, *around = _named(texts(), "video_token", "start_image_token", "end_image_token")
    if mark is None:
        raise LookupError("its config.json names no token that stands for videos")
    if kind in GRIDS:
        return GridVideo(settings, mark, vision)
    if kind in TIMED:
        if tokenizer is None:
            texts()  # which says so
        around = [config.vision_start_token_id, config.vision_end_token_id]
        return TimedGridVideo(settings, mark, vision, around, lambda text: texts().ids(text))
    side, patch = (
        size if isinstance(size, int) else size[0]
        for size in (vision.image_size, vision.patch_size)
    )
    if kind in _NUMBERED:
        rows = config.image_seq_length
        return FrameVideo(settings, (mark, token), side, rows, around, texts().ids)
    if kind == "llava_onevision":  # halved in both directions, and a token behind all
        return SquareVideo(settings, (mark, mark), side, ((-(-(side // patch) // 2)) ** 2, 1))
    return SquareVideo(settings, (mark, mark), side, ((side // patch) ** 2 // 4, 0))


def _named(tokenizer: Any, *names: str) -> list[int]:
    """Tokens by the names that a tokenizer has for them.  Raises LookupError."""
    tokens = [tokenizer.convert_tokens_to_ids(getattr(tokenizer, name, None)) for name in names]
    if None in tokens or tokenizer.unk_token_id in tokens:
        raise LookupError(f"its tokenizer does not name {', '.join(names)}")
    return tokens


def settings_in(folder: Path) -> Mapping[str, Any]:
    """Fields of the video processor in `folder`: of the first file that has one, or an image's."""
    for name in OF_VIDEOS:
        read = read_object(folder / name)
        found = read.get("video_processor") if name == OF_VIDEOS[0] else read
        if found:
            return found if isinstance(found, Mapping) else {}
    return read_object(folder / "preprocessor_config.json")
