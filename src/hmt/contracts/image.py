"""Images and videos of a prompt: as given, as an encoder takes them, and what it makes of one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hmt.contracts.step import ImageTokens
from hmt.contracts.store import Weights

# A file's path, a file's bytes (PNG, JPEG, WebP or GIF), or a PIL.Image.
ImageInput = Any
# A file's path, a file's bytes (an animation in GIF, WebP or PNG; with PyAV also MP4, QuickTime,
# WebM and Matroska), a sequence of images, which are its frames, or a Video.
VideoInput = Any


@dataclass(frozen=True, slots=True)
class Video:
    """A video, and how fast its frames follow each other.

    source   as VideoInput
    fps      frames of it in a second; None: as its file says, and 24 of a sequence of images, which
             is what transformers takes for them
    """

    source: VideoInput
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """Which frames of a video an encoder takes, and in which size.

    indices         of the frames, rising; of all `frames` that the video has, `fps` in a second
    height, width   pixels to which each is resized
    """

    indices: tuple[int, ...]
    frames: int
    fps: float
    height: int
    width: int

    @property
    def nbytes(self) -> int:
        """Of what is prepared of them: three numbers of f32 for each pixel."""
        return len(self.indices) * self.height * self.width * 3 * 4


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class PreparedImage:
    """One image or video as an encoder takes it, which nothing changes any more.

    key         hexadecimal: a hash of its pixels and of how they are prepared, by which equal
                images are the same
    inputs      what the encoder is called with, by name
    tokens      of a prompt that stand for rows of its features
    written     what a prompt has in its place: those tokens, and others around and between them
    feature_bytes   of what is made of it
    work_bytes  what that takes besides, and beside weights
    video       whether it is a video
    grid_s      seconds of a video from one row of its grid in time to the next
    """

    key: str
    inputs: Mapping[str, Tensor]
    tokens: int
    feature_bytes: int
    work_bytes: int
    written: tuple[int, ...]
    video: bool = False
    grid_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Of `inputs`."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def device_bytes(self) -> int:
        """That a device takes while it encodes the image, beside weights."""
        return self.nbytes + self.work_bytes + self.feature_bytes


@dataclass(frozen=True, eq=False, slots=True)
class ImageFeatures:
    """What an encoder makes of an image.

    rows    [tokens, hidden_size]: in the place of its tokens' embeddings
    layers  each [tokens, hidden_size]: added to the hidden states behind the first layers, in
            order (DeepStack, arXiv 2406.04334)
    """

    rows: Tensor
    layers: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(rows.nbytes for rows in (self.rows, *self.layers))


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt in which tokens stand for images.

    tokens     with as many for each image as it has rows
    positions  rotary positions of each token on three axes, each as many as there are tokens; ():
               those of the tokens' places, for models whose positions have one axis
    blocks     (first, behind the last) tokens of each image, or part of one, that see each other
    """

    tokens: list[int]
    images: tuple[ImageTokens, ...]
    positions: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()


class ImageEncoder(Protocol):
    """A vision tower, and what prepares images for it.  For any thread, but for `encode`.

    most_bytes     that images may take: while one is decoded and encoded, and as they are kept
    device_bytes   of an image of 1024 x 1024 pixels, and of the largest; see PreparedImage
    videos_refused why it takes no videos; "" where it does
    """

    most_bytes: int
    device_bytes: tuple[int, int]
    videos_refused: str

    def prepare(self, pixels: Tensor) -> PreparedImage:
        """An image of uint8 [height, width, 3].  Raises RequestError where it cannot be encoded."""
        ...

    def choose(
        self, frames: int, fps: float, size: tuple[int, int], *, sampled: bool
    ) -> ChosenFrames:
        """Which of the `frames` of a video are taken, and as how large, of `size` (height, width).

        sampled   they are a choice already: all are taken
        Raises RequestError where it cannot be encoded.
        """
        ...

    def prepare_video(self, frames: Iterable[Tensor], chosen: ChosenFrames) -> PreparedImage:
        """A video of the chosen frames, each uint8 [height, width, 3], asked for one by one.

        Raises RequestError where it cannot be encoded, and what asking for a frame raises.
        """
        ...

    def prompt(self, tokens: list[int], images: list[PreparedImage]) -> ImagePrompt:
        """A prompt in which one token stands for each image, with as many as each has.

        images   and videos, each kind in the order of its tokens
        Raises RequestError unless there are as many of these as images.  What comes of an image is
        its `written`; where text meets at its edges, that may be other tokens.
        """
        ...

    def encode(self, image: PreparedImage, weights: Weights) -> ImageFeatures:
        """What layers compute from in the place of the image's tokens, in host memory.

        Leases blocks one by one, and computes where they lie, which is the same place for all.
        Equal for equal images, whatever is computed beside them.
        """
        ...
