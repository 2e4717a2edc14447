"""From a video to its frames: files are decoded in a child process, within limits."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hmt.base.errors import BudgetError, ConfigError, MachineError, RequestError
from hmt.contracts.image import ImageInput, Video, VideoInput
from hmt.models.vision.decoding import ImageDecoder, file_bytes, pixels_of
from hmt.sandbox import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker

MOST_FILE_BYTES: Final = 128 << 20
MOST_FRAMES: Final = 1 << 16  # of a file: 36 minutes of 30 in a second
_MOST_PIXELS: Final = 1 << 24  # of a frame: 4096 x 4096
_MOST_FPS: Final = 1000.0
_USUAL_FPS: Final = 24.0  # what transformers takes frames for that come without times
_FORMATS: Final = (
    "give a whole file: an animation in GIF, WebP or PNG, or MP4, QuickTime, WebM or Matroska"
)
# A file, and as many frames of the largest size as H.264 refers to, in a byte and a half a pixel.
_LIMITS: Final = Limits(memory_bytes=1 << 30, cpu_s=30.0)
_PREPARE: Final = Limits(memory_bytes=1 << 30, cpu_s=20.0)  # importing Pillow and PyAV


class FrameSource:
    """Frames of one video, until it is closed.

    frames         that it has
    height, width  pixels of each, as its file says
    fps            frames in a second
    sampled        they were chosen by who gives them, and all are meant
    """

    frames: int
    height: int
    width: int
    fps: float
    sampled: bool

    def frame(self, index: int) -> Tensor:
        """One frame, uint8 [height, width, 3]; indices must rise from call to call.

        Raises RequestError where it cannot be decoded, BudgetError, ConfigError.
        """
        raise NotImplementedError


class VideoDecoder:
    """Decodes one file at a time, each in a worker of its own.  For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandbox = _sandbox()

    @contextmanager
    def opened(self, video: VideoInput, images: ImageDecoder) -> Iterator[FrameSource]:
        """A video's frames.  `images` decodes those that are files of their own.

        Raises RequestError for what is none, or takes PyAV where that is not; BudgetError,
        ConfigError.
        """
        given = video if isinstance(video, Video) else Video(video)
        fps = given.fps
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps <= _MOST_FPS):
            raise RequestError(
                f"a video has {fps!r} frames per second; give up to {_MOST_FPS:g}, or None"
            )
        if not isinstance(given.source, bytes | str | PathLike):
            yield _Listed(given.source, fps, images)
            return
        data = video_bytes(given.source)
        with self._lock:
            file = _File(self._sandbox, data, fps)
            try:
                yield file
            finally:
                file.close()

    def rest(self) -> bool:
        """End the child process; the next video starts another.  False while it decodes."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._sandbox.close()
            self._sandbox = _sandbox()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        """End the child process."""
        self._sandbox.close()


class _File(FrameSource):
    """Those of a file."""

    def __init__(self, sandbox: Sandbox, data: bytes, fps: float | None) -> None:
        self._used_s = 0.0
        self._worker: Worker | None = None
        try:
            self._worker = sandbox.fork()
            said = self._asked(None, data).message
        except (Refused, Ended, Lost) as error:
            self.close()
            raise _error(error) from None
        except BaseException:
            self.close()
            raise
        self.frames, seconds = int(said["frames"]), float(said["seconds"])
        self.height, self.width = int(said["height"]), int(said["width"])
        lasts = self.frames / seconds if seconds > 0 else _USUAL_FPS
        self.fps = min(lasts if fps is None else float(fps), _MOST_FPS)
        self.sampled = False

    def frame(self, index: int) -> Tensor:
        try:
            reply = self._asked(index, b"")
        except (Refused, Ended, Lost) as error:
            raise _error(error) from None
        shape = int(reply.message["height"]), int(reply.message["width"]), 3
        # Memory is taken by the size that the file says its frames have.
        most_bytes = 3 * self.height * self.width
        if len(reply.blob) != shape[0] * shape[1] * 3 or len(reply.blob) > most_bytes:
            raise RequestError(f"a video cannot be decoded: {_FORMATS}")
        return torch.from_numpy(np.frombuffer(reply.blob, np.uint8).copy().reshape(shape))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()

    def _asked(self, frame: int | None, data: bytes) -> Reply:
        assert self._worker is not None
        left_s = max(_LIMITS.cpu_s - self._used_s, 0.1)
        reply = self._worker.call({"frame": frame}, data, cpu_s=left_s)
        self._used_s = float(reply.message["cpu_s"])
        return reply


class _Listed(FrameSource):
    """Images that are given one by one."""

    def __init__(self, source: Any, fps: float | None, images: ImageDecoder) -> None:
        if not isinstance(source, Sequence) or not source:
            raise RequestError(
                f"a video is {type(source).__name__}; give a path, the bytes of a file, or a list "
                "of images, of which there is at least one"
            )
        self._source: Sequence[ImageInput] = source
        self._images = images
        first = file_bytes(source[0])
        self.width, self.height = source[0].size if first is None else images.size(first)
        self.frames, self.sampled = len(source), True
        self.fps = _USUAL_FPS if fps is None else float(fps)

    def frame(self, index: int) -> Tensor:
        image = self._source[index]
        data = file_bytes(image)
        width, height = image.size if data is None else self._images.size(data)
        if (width, height) != (self.width, self.height):
            raise RequestError(
                f"frame {index} of a video has {width} x {height} pixels, and the first has "
                f"{self.width} x {self.height}: give frames of one size"
            )
        return pixels_of(image) if data is None else self._images.pixels(data)


def video_bytes(source: bytes | str | PathLike[str]) -> bytes:
    """The file of a video.  Raises RequestError where it cannot be read, or is too large."""
    data = file_bytes(source, "video", MOST_FILE_BYTES)
    assert data is not None
    return data


def _sandbox() -> Sandbox:
    return Sandbox(
        "hmt.sandbox.video_decoding:Videos",
        {"most_pixels": _MOST_PIXELS, "most_frames": MOST_FRAMES},
        prepare=_PREPARE,
        worker=_LIMITS,
    )


def _error(error: Exception) -> Exception:
    if isinstance(error, Ended) and not error.killed:
        return RequestError(f"a video cannot be decoded: {error}; give a shorter or smaller one")
    if not isinstance(error, Refused):
        return BudgetError(
            "a video cannot be decoded now, since the process that decodes was killed, as systems "
            "do without memory: try again later"
        )
    if error.kind == "package":
        return RequestError(
            "MP4, QuickTime, WebM and Matroska are decoded by PyAV (`av`), which is not installed: "
            "pip install 'hmt[video]', or give an animation in GIF, WebP or PNG"
        )
    if error.kind == "frames":
        return RequestError(
            f"a video has more than {MOST_FRAMES} frames, which is the most: give a part of it"
        )
    if error.kind == "pixels":
        width, height = error.more.get("width"), error.more.get("height")
        has = f"{width} x {height}" if width else "too many"
        return RequestError(
            f"a video has frames of {has} pixels; the most is {_MOST_PIXELS} in all: make it "
            "smaller"
        )
    if error.kind == "memory":
        return RequestError("a video takes more memory to decode than it may: make it smaller")
    if error.more.get("type") in ("ModuleNotFoundError", "ImportError"):
        return ConfigError(
            "videos are decoded by Pillow, which is not installed: pip install hmt[images]"
        )
    if error.kind == "format":
        return RequestError(f"a video cannot be decoded: {_FORMATS}")
    return MachineError(f"videos cannot be decoded: {error}")
