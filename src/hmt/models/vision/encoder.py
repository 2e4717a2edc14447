"""An image encoder: image processor, tower, and what stands for images in prompts."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hmt.base.errors import RequestError
from hmt.contracts.image import ImageFeatures, ImagePrompt, PreparedImage
from hmt.contracts.step import ImageTokens
from hmt.contracts.store import Weights
from hmt.models.vision.decoding import DECODING_BYTES
from hmt.models.vision.positions import RopeIndex
from hmt.models.vision.processing import Processing

if TYPE_CHECKING:  # transformers' code takes longer to import than all else, and text needs none
    from hmt.models.vision.tower import Tower

_KEPT: Final = 8  # of the largest images, of all requests, that memory is planned for
_MOST_PATCHES: Final = 1 << 16  # of one image: where attention alone takes minutes
_PIXELS: Final = ("pixel_values", "pixel_values_local")
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

    axes   gives rotary positions of tokens on several axes (M-RoPE, arXiv 2409.12191); None:
           positions have one axis
    together   an image's tokens see each other
    added      features are added behind the language model's first layers, too
    """

    def __init__(
        self,
        tower: "Tower",
        processing: Processing,
        sizes: TowerSizes,
        *,
        axes: RopeIndex | None = None,
        together: bool = False,
        added: bool = False,
    ) -> None:
        self.tower = tower
        self._processing = processing
        self._sizes = sizes
        self._axes = axes
        self.together = together
        self.added = added
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
        places = [number for number, token in enumerate(tokens) if token == held.mark]
        if len(places) != len(images):
            raise RequestError(
                f"the prompt has {len(places)} places for images (token {held.mark}), and "
                f"{len(images)} images were given: a chat needs an image part for each, other "
                "prompts the token itself"
            )
        whole: list[int] = tokens[: places[0]]
        for place, end, image in zip(places, [*places[1:], len(tokens)], images, strict=True):
            whole = held.joined(whole, image.written)
            whole = held.joined(whole, tokens[place + 1 : end])
        if sum(token in held.tokens for token in whole) != sum(image.tokens for image in images):
            raise RequestError(
                f"the prompt has tokens {sorted(held.tokens)} besides those of its images: leave "
                "them out"
            )
        spans = tuple(_spans(whole, held.tokens, images))
        blocks = tuple((s.offset, s.offset + s.length) for s in spans) if self.together else ()
        return ImagePrompt(whole, spans, self._positions(whole, spans, images), blocks)

    def encode(self, image: PreparedImage, weights: Weights) -> ImageFeatures:
        """See ImageEncoder."""
        return self.tower.features(image.inputs, weights, image.tokens)

    def _positions(
        self, tokens: list[int], spans: Sequence[ImageTokens], images: list[PreparedImage]
    ) -> tuple[tuple[int, ...], ...]:
        if self._axes is None:
            return ()
        of_image = torch.zeros(len(tokens), dtype=torch.int32)
        for span in spans:
            of_image[span.offset : span.offset + span.length] = 1
        grids = torch.cat([image.inputs["image_grid_thw"] for image in images])
        return tuple(tuple(axis) for axis in self._axes(tokens, of_image, grids).tolist())


def _spans(tokens: list[int], rows: Set[int], images: list[PreparedImage]) -> Iterator[ImageTokens]:
    """Runs of tokens of `rows`, which stand for rows of the images' features in turn."""
    places = [number for number, one in enumerate(tokens) if one in rows]
    for image in images:
        own, places = places[: image.tokens], places[image.tokens :]
        first = 0
        for number, place in enumerate(own):
            if number + 1 == len(own) or own[number + 1] != place + 1:
                yield ImageTokens(image.key, first, own[first], number + 1 - first)
                first = number + 1
