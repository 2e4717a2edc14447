"""Decoding videos, in a child process: files of strangers, and decoders in C.

Animations in GIF, WebP and PNG are decoded by Pillow; MP4, QuickTime, WebM and Matroska by PyAV
(FFmpeg), where that is installed.
"""

import io
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

from PIL import Image

from hmt.sandbox.animations import Animation, animation_in
from hmt.sandbox.image_decoding import confine_pillow, in_rgb
from hmt.sandbox.refusal import Refusal

_ANIMATED: Final = ("GIF", "PNG", "WEBP")


class Videos:
    """A role: a worker opens one video, and then decodes frames of it in their order."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        """`settings`: the "most_pixels" of a frame, and the "most_frames" of a file."""
        self._most_pixels: int = settings["most_pixels"]
        self._most_frames: int = settings["most_frames"]
        self._opened: _Moving | _Container | None = None
        confine_pillow(self._most_pixels)
        if find_spec("av") is not None:
            import av  # noqa: F401  # takes 0.2 s, and each worker has it then

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """{"frame": null}: the answer has "width", "height", number of "frames" and "seconds".

        They are of the video in `blob`, which is read from then on.

        {"frame": number}: one of its frames, uint8 [height, width, 3], with its "width" and
        "height"; numbers must rise from call to call.

        "cpu_s" is the processor time that the worker has taken by now.  Raises Refusal of kinds
        "format", "pixels", "frames", and "package", where it takes PyAV.
        """
        try:
            if message["frame"] is None:
                self._opened = self._open(blob)
                said, pixels = self._opened.about(), b""
            else:
                assert self._opened is not None
                frame = self._opened.frame(message["frame"])
                said, pixels = {"width": frame.width, "height": frame.height}, frame.tobytes()
        except (Refusal, MemoryError):
            raise
        except Image.DecompressionBombError as error:
            raise Refusal("pixels", "") from error
        except Exception as error:  # of decoders: OSError, SyntaxError, EOFError, av.FFmpegError
            raise Refusal("format", "") from error
        return said | {"cpu_s": time.process_time()}, pixels

    def _open(self, data: bytes) -> "_Moving | _Container":
        moving = animation_in(data, self._most_frames)
        if moving is not None:
            return _Moving(data, moving, self._most_pixels)
        # By name, as FFmpeg's readers of play lists would open what these name.
        kind = "mp4" if data[4:8] == b"ftyp" else "matroska"
        if kind == "matroska" and not data.startswith(b"\x1a\x45\xdf\xa3"):
            raise Refusal("format", "")
        if find_spec("av") is None:
            raise Refusal("package", "")
        return _Container(data, kind, self._most_pixels, self._most_frames)


class _Moving:
    """An animation that Pillow decodes."""

    def __init__(self, data: bytes, found: Animation, most_pixels: int) -> None:
        self._found, self._most_pixels = found, most_pixels
        self._image = Image.open(io.BytesIO(data), formats=_ANIMATED)
        _check_pixels(*self._image.size, most_pixels)

    def about(self) -> dict[str, Any]:
        width, height = self._image.size
        found = self._found
        return {"width": width, "height": height, "frames": found.frames, "seconds": found.seconds}

    def frame(self, number: int) -> Image.Image:
        if number or self._found.first:
            self._image.seek(number + self._found.first)
        _check_pixels(*self._image.size, self._most_pixels)  # it may reach beyond the first
        return in_rgb(self._image)


class _Container:
    """A file with a video stream, which FFmpeg decodes in one thread."""

    def __init__(self, data: bytes, kind: str, most_pixels: int, most_frames: int) -> None:
        import av

        self._most_pixels = most_pixels
        self._held: Any = av.open(io.BytesIO(data), "r", format=kind)
        self._stream = self._held.streams.video[0]
        codec = self._stream.codec_context
        codec.thread_type, codec.thread_count = "NONE", 1
        codec.options = {"max_pixels": str(most_pixels)}
        _check_pixels(codec.width, codec.height, most_pixels)
        self._frames = self._counted(most_frames)
        self._held.seek(0)
        self._decoded: Iterator[Any] = self._held.decode(self._stream)
        self._next = 0

    def _counted(self, most: int) -> int:
        """Frames by their packets: what headers say of them may be wrong, or be missing."""
        count = 0
        for packet in self._held.demux(self._stream):
            count += packet.size > 0
            if count > most:
                raise Refusal("frames", "", most=most)
        if not count:
            raise Refusal("format", "")
        return count

    def about(self) -> dict[str, Any]:
        codec, rate = self._stream.codec_context, self._stream.average_rate
        seconds = float(self._frames / rate) if rate else 0.0
        return {
            "width": codec.width, "height": codec.height, "frames": self._frames,
            "seconds": seconds,
        }  # fmt: skip

    def frame(self, number: int) -> Image.Image:
        while True:
            frame = next(self._decoded, None)
            if frame is None:
                raise Refusal("format", "")
            self._next += 1
            if self._next > number:
                _check_pixels(frame.width, frame.height, self._most_pixels)
                image: Image.Image = frame.to_image()
                return image


def _check_pixels(width: int, height: int, most: int) -> None:
    if not 0 < width * height <= most:
        raise Refusal("pixels", "", width=width, height=height)
