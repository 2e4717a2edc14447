"""An image encoder: image processor, tower, and what stands for images in prompts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hmt.base.errors import RequestError
from hmt.contracts.image import ChosenFrames, ImageFeatures, ImagePrompt, PreparedImage
from hmt.contracts.step import ImageTokens
from hmt.contracts.store import Weights
from hmt.models.vision.decoding import DECODING_BYTES
from hmt.models.vision.positions import RopeIndex
from hmt.models.vision.processing import Processing
from hmt.models.vision.videos import VideoProcessing

if TYPE_CHECKING:  # transformers' code takes longer to import than all else, and text needs none
    from hmt.models.vision.tower import Tower

_KEPT: Final = 8  # of the largest images, of all requests, that memory is planned for
_MOST_PATCHES: Final = 1 << 16  # of one image: where attention alone takes minutes
_MOST_VIDEO_PATCHES: Final = 1 << 18  # of one video, whose frames do not see each other
_PIXELS: Final = ("pixel_values", "pixel_values_local", "pixel_values_videos")
_USUAL_PIXELS: Final = 5 << 18  # of an image of 1024 x 1024, and what resizing adds


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a tower, for memory, and of what a prompt has for an image.

    width, wide   numbers of a patch between and within layers
    out_width     numbers of a token's features, those for the first layers included
    patch         pixels of a patch in each direction
    most_patches  of the largest image that the processor makes
    merge         patches in each direction that become one token
    extra         rows that the tower has besides those of patches, and that become tokens
    kept          layers whose results are kept to the end
    squares       numbers for each pair of patches of one tile, of masks
    """

    width: int
    wide: int
    out_width: int
    patch: int
    most_patches: int
    merge: int = 1
    extra: int = 0
    kept: int = 0
    squares: int = 0

    def patches(self, inputs: Mapping[str, Tensor]) -> int:
        """Of a prepared image."""
        grid = inputs.get("image_grid_thw")
        if grid is not None:
            return int(grid.prod())
        return pixel_count(inputs) // (3 * self.patch**2)

    def tokens(self, patches: int) -> int:
        """That stand for an image of so many patches."""
        return patches // self.merge**2 + self.extra

    def work_bytes(self, patches: int, itemsize: int) -> int:
        """What a layer takes beside its weights, residual, queries, keys and values included.

        With the pixels once more in the activations' dtype.
        """
        pixels = 2 * 3 * self.patch**2
        numbers = patches * ((12 + self.kept) * self.width + 3 * self.wide + pixels)
        return (numbers + self.squares * patches**2) * max(itemsize, 4)


def pixel_count(inputs: Mapping[str, Any]) -> int:
    """Numbers of pixels in what an image processor makes, in tiles of several kinds."""
    return sum(torch.as_tensor(inputs[name]).numel() for name in _PIXELS if name in inputs)


class Encoder:
    """Implements ImageEncoder with transformers' modules.

    axes   a `get_rope_index`, of rotary positions on several axes (M-RoPE, arXiv 2409.12191); None:
           positions have one axis
    together   an image's tokens see each other
    videos     what videos are prepared by, or why there are none
    """

    def __init__(
        self,
        tower: "Tower",
        processing: Processing,
        sizes: TowerSizes,
        *,
        axes: Callable[..., Any] | None = None,
        together: bool = False,
        videos: VideoProcessing | str = "",
    ) -> None:
        self.tower = tower
        self.videos = None if isinstance(videos, str) else videos
        self.videos_refused = videos if isinstance(videos, str) else ""
        self._processing = processing
        self._sizes = sizes
        self._axes = None if axes is None else RopeIndex(axes)
        self.together = together
        kept, work = self._most(sizes.most_patches)
        self.most_bytes = work + _KEPT * kept + DECODING_BYTES
        usual = min(sizes.most_patches, _USUAL_PIXELS // sizes.patch**2)
        self.device_bytes = sum(self._most(usual)), kept + work

    def _most(self, patches: int) -> tuple[int, int]:
        """Of an image of so many patches: pixels and features, and what encoding it takes."""
        sizes, itemsize = self._sizes, 4
        pixels = patches * 2 * 3 * sizes.patch**2
        kept = (pixels + sizes.tokens(patches) * sizes.out_width) * itemsize
        return kept, sizes.work_bytes(patches, itemsize) + self.tower.own_bytes

    def prepare(self, pixels: Tensor) -> PreparedImage:
        """See ImageEncoder."""
        try:
            made = self._processing.made(pixels)
        except Exception as error:  # of transformers' code, for sizes that it cannot resize
            height, width = pixels.shape[:2]
            raise RequestError(
                f"an image of {width} x {height} pixels cannot be prepared for this model: {error}"
            ) from error
        inputs = {n: torch.as_tensor(made[n]) for n in self.tower.takes if n in made}
        patches = self._sizes.patches(inputs)
        if patches > _MOST_PATCHES:
            raise RequestError(
                f"an image becomes {patches} patches; the most is {_MOST_PATCHES}: make it smaller"
            )
        written = self._processing.written(made, self._sizes.tokens(patches))
        tokens = sum(token in self._processing.tokens for token in written)
        itemsize = inputs["pixel_values"].itemsize
        return PreparedImage(
            key=self._key(pixels),
            inputs=inputs,
            tokens=tokens,
            feature_bytes=tokens * self._sizes.out_width * itemsize,
            work_bytes=self._sizes.work_bytes(patches, itemsize) + self.tower.own_bytes,
            written=tuple(written),
        )

    def choose(
        self, frames: int, fps: float, size: tuple[int, int], *, sampled: bool
    ) -> ChosenFrames:
        """See ImageEncoder."""
        assert self.videos is not None
        try:
            chosen = self.videos.choose(frames, fps, *size, sampled=sampled)
        except ValueError as error:
            raise RequestError(
                f"a video of {frames} frames of {size[1]} x {size[0]} pixels cannot be prepared "
                f"for this model: {error}"
            ) from error
        patches = chosen.nbytes // (3 * 4 * self._sizes.patch**2)
        if patches > _MOST_VIDEO_PATCHES:
            raise RequestError(
                f"a video has {patches} patches in {len(chosen.indices)} frames; the most is "
                f"{_MOST_VIDEO_PATCHES}: make it smaller, or shorter"
            )
        return chosen

    def prepare_video(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> PreparedImage:
        """See ImageEncoder.

        Its key is a hash of what is encoded and of its times, which positions and text tell of.
        """
        assert self.videos is not None
        inputs = self.videos.made(frames, chosen)
        pixels = next(iter(inputs.values()))
        grid_s = self.videos.grid_s(chosen)
        patches = self._sizes.patches(inputs)
        written = self.videos.written(self._sizes.tokens(patches), chosen)
        tokens = written.count(self.videos.token)
        digest = hashlib.blake2b(self.videos.described, digest_size=16)
        digest.update(f" {tuple(pixels.shape)} {grid_s} {written}".encode())
        digest.update(pixels.flatten().numpy().data)
        return PreparedImage(
            key=digest.hexdigest(),
            inputs=inputs,
            tokens=tokens,
            feature_bytes=tokens * self._sizes.out_width * pixels.itemsize,
            work_bytes=self._sizes.work_bytes(patches, pixels.itemsize) + self.tower.own_bytes,
            written=tuple(written),
            video=True,
            grid_s=grid_s,
        )

    def _key(self, pixels: Tensor) -> str:
        """A hash of an image and of how it is prepared, which tell what is encoded.

        Pixels have an eighth of the bytes of what is made of them, whose hash took 25 ms for an
        image of 1024 x 1024.
        """
        digest = hashlib.blake2b(self._processing.described, digest_size=16)
        digest.update(f" {tuple(pixels.shape)} ".encode())
        digest.update(pixels.flatten().numpy().data)
        return digest.hexdigest()

    def prompt(self, tokens: list[int], images: list[PreparedImage]) -> ImagePrompt:
        """See ImageEncoder."""
        held = self._processing
        # Without a video its token is one as all others.
        videos = self.videos if any(image.video for image in images) else None
        marks = {held.mark: False} | ({} if videos is None else {videos.mark: True})
        places = [number for number, token in enumerate(tokens) if token in marks]
        ordered = self._in_places([marks[tokens[place]] for place in places], images)
        whole: list[int] = tokens[: places[0]]
        for place, end, image in zip(places, [*places[1:], len(tokens)], ordered, strict=True):
            whole = held.joined(whole, image.written)
            whole = held.joined(whole, tokens[place + 1 : end])
        rows = [self._tokens(image) for image in ordered]
        for tokens_of in set(rows):
            own = sum(i.tokens for i, one in zip(ordered, rows, strict=True) if one == tokens_of)
            if sum(token in tokens_of for token in whole) != own:
                raise RequestError(
                    f"the prompt has tokens {sorted(tokens_of)} besides those of its images: leave "
                    "them out"
                )
        spans = tuple(_spans(whole, rows, ordered))
        blocks = tuple((s.offset, s.offset + s.length) for s in spans) if self.together else ()
        return ImagePrompt(whole, spans, self._positions(whole, spans, ordered), blocks)

    def _in_places(self, places: list[bool], images: list[PreparedImage]) -> list[PreparedImage]:
        """Images and videos in the order of their `places`, of which some are videos'.

        Raises RequestError unless there are as many of each kind.
        """
        for video, kind, part in ((False, "images", "an image"), (True, "videos", "a video")):
            here, given = places.count(video), sum(image.video == video for image in images)
            if here != given:
                held = self.videos if video and self.videos is not None else self._processing
                raise RequestError(
                    f"the prompt has {here} places for {kind} (token {held.mark}), and "
                    f"{given} {kind} were given: a chat needs {part} part for each "
                    "and a template that writes it, other prompts the token itself"
                )
        left = {video: iter([i for i in images if i.video == video]) for video in (False, True)}
        return [next(left[video]) for video in places]

    def _tokens(self, image: PreparedImage) -> frozenset[int]:
        """That stand for a row of its features."""
        own = frozenset(self._processing.tokens)
        if image.video and self.videos is not None and self.videos.token not in own:
            return frozenset({self.videos.token})
        return own

    def encode(self, image: PreparedImage, weights: Weights) -> ImageFeatures:
        """See ImageEncoder."""
        return self.tower.features(image.inputs, weights, image.tokens)

    def _positions(
        self, tokens: list[int], spans: Sequence[ImageTokens], images: list[PreparedImage]
    ) -> tuple[tuple[int, ...], ...]:
        if self._axes is None:
            return ()
        kinds = torch.zeros(len(tokens), dtype=torch.int32)
        videos = {image.key for image in images if image.video}
        for span in spans:
            kinds[span.offset : span.offset + span.length] = 1 + (span.key in videos)
        grids: dict[bool, list[Tensor]] = {False: [], True: []}
        for image in images:
            grids[image.video].append(image.inputs["image_grid_thw"])
        found = self._axes(
            tokens,
            kinds,
            *(torch.cat(grids[video]) if grids[video] else None for video in (False, True)),
            grid_s=[image.grid_s for image in images if image.video],
        )
        return tuple(tuple(axis) for axis in found.tolist())


def _spans(
    tokens: list[int], rows: list[frozenset[int]], images: list[PreparedImage]
) -> Iterator[ImageTokens]:
    """Runs of each image's tokens, which stand for rows of its features in turn.

    rows   tokens that stand for a row of each image
    """
    places = {
        some: [number for number, token in enumerate(tokens) if token in some] for some in set(rows)
    }
    for some, image in zip(rows, images, strict=True):
        own, places[some] = places[some][: image.tokens], places[some][image.tokens :]
        first = 0
        for number, place in enumerate(own):
            if number + 1 == len(own) or own[number + 1] != place + 1:
                yield ImageTokens(image.key, first, own[first], number + 1 - first)
                first = number + 1
