"""An image encoder: image processor, tower, and what stands for images in prompts."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hmt.base.errors import RequestError
from hmt.contracts.image import ImageFeatures, ImagePrompt, PreparedImage
from hmt.contracts.step import ImageTokens
from hmt.contracts.store import Weights
from hmt.models.vision.decoding import DECODING_BYTES
from hmt.models.vision.tower import Tower

_TAKEN: Final = ("pixel_values", "image_grid_thw")  # what towers are called with
_KEPT: Final = 8  # of the largest images, of all requests, that memory is planned for
_MOST_PATCHES: Final = 1 << 16  # of one image: where attention alone takes minutes


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a tower, for memory, and of what a prompt has for an image.

    width, wide   numbers of a patch between and within layers
    out_width     numbers of a token's features, those for the first layers included
    patch         pixels of a patch in each direction
    most_patches  of the largest image that the processor makes
    merge         patches in each direction that become one token
    extra         rows that the tower has besides those of patches, and that become tokens
    """

    width: int
    wide: int
    out_width: int
    patch: int
    most_patches: int
    merge: int = 1
    extra: int = 0

    def patches(self, inputs: Mapping[str, Tensor]) -> int:
        """Of a prepared image."""
        grid = inputs.get("image_grid_thw")
        if grid is not None:
            return int(grid.prod())
        height, width = inputs["pixel_values"].shape[-2:]
        return (height // self.patch) * (width // self.patch)

    def tokens(self, patches: int) -> int:
        """That stand for an image of so many patches."""
        return patches // self.merge**2 + self.extra

    def work_bytes(self, patches: int, itemsize: int) -> int:
        """What a layer takes beside its weights, residual, queries, keys and values included.

        With the pixels once more in the activations' dtype.
        """
        pixels = 2 * 3 * self.patch**2
        return patches * (12 * self.width + 3 * self.wide + pixels) * max(itemsize, 4)

    def feature_bytes(self, patches: int, itemsize: int) -> int:
        """Of an image's features."""
        return self.tokens(patches) * self.out_width * itemsize


class Encoder:
    """Implements ImageEncoder with transformers' modules.

    axes   gives rotary positions of tokens on three axes (M-RoPE, arXiv 2409.12191), as
           transformers' `get_rope_index`; None: positions have one axis
    """

    def __init__(
        self, tower: Tower, processor: Any, token: int, sizes: TowerSizes, axes: Any | None
    ) -> None:
        """`token` stands for an image in prompts."""
        self.tower = tower
        self._processor = processor
        self._token = token
        self._sizes = sizes
        self._axes = axes
        most, itemsize = sizes.most_patches, 4
        kept = sizes.feature_bytes(most, itemsize) + most * 2 * 3 * sizes.patch**2 * itemsize
        self.most_bytes = sizes.work_bytes(most, itemsize) + _KEPT * kept + DECODING_BYTES

    def prepare(self, pixels: Tensor) -> PreparedImage:
        """See ImageEncoder."""
        try:
            made = self._processor(
                images=[pixels.numpy()], return_tensors="pt", input_data_format="channels_last"
            )
        except Exception as error:  # of transformers' code, for sizes that it cannot resize
            height, width = pixels.shape[:2]
            raise RequestError(
                f"an image of {width} x {height} pixels cannot be prepared for this model: {error}"
            ) from error
        inputs = {name: made[name] for name in _TAKEN if name in made}
        patches = self._sizes.patches(inputs)
        if patches > _MOST_PATCHES:
            raise RequestError(
                f"an image becomes {patches} patches; the most is {_MOST_PATCHES}: make it smaller"
            )
        itemsize = inputs["pixel_values"].itemsize
        return PreparedImage(
            _key(inputs),
            inputs,
            self._sizes.tokens(patches),
            self._sizes.feature_bytes(patches, itemsize),
            self._sizes.work_bytes(patches, itemsize),
        )

    def prompt(self, tokens: list[int], images: list[PreparedImage]) -> ImagePrompt:
        """See ImageEncoder."""
        places = [number for number, token in enumerate(tokens) if token == self._token]
        if len(places) != len(images):
            raise RequestError(
                f"the prompt has {len(places)} places for images (token {self._token}), and "
                f"{len(images)} images were given: a chat needs an image part for each, other "
                "prompts the token itself"
            )
        whole: list[int] = []
        spans: list[ImageTokens] = []
        before = 0
        for place, image in zip(places, images, strict=True):
            whole += tokens[before:place]
            spans.append(ImageTokens(image.key, 0, len(whole), image.tokens))
            whole += [self._token] * image.tokens
            before = place + 1
        whole += tokens[before:]
        return ImagePrompt(whole, tuple(spans), self._positions(whole, spans, images))

    def encode(self, image: PreparedImage, weights: Weights) -> ImageFeatures:
        """See ImageEncoder."""
        return self.tower.features(image.inputs, weights, image.tokens)

    def _positions(
        self, tokens: list[int], spans: list[ImageTokens], images: list[PreparedImage]
    ) -> tuple[tuple[int, ...], ...]:
        if self._axes is None:
            return ()
        kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
        for span in spans:
            kinds[0, span.offset : span.offset + span.length] = 1
        found, _ = self._axes(
            torch.tensor([tokens]),
            mm_token_type_ids=kinds,
            image_grid_thw=torch.cat([image.inputs["image_grid_thw"] for image in images]),
        )
        return tuple(tuple(axis) for axis in found[:, 0].tolist())


def _key(inputs: Mapping[str, Tensor]) -> str:
    """A hash of an image as it is encoded."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
