"""From an image file to pixels: decoded in a child process, within limits."""

import threading
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hmt.base.errors import BudgetError, ConfigError, MachineError, RequestError, os_reason
from hmt.base.units import format_bytes
from hmt.contracts.image import ImageInput
from hmt.sandbox import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker

MOST_FILE_BYTES: Final = 32 << 20
MOST_PIXELS: Final = 1 << 25  # 5792 x 5792
# Of one pixel while a file is decoded: in the process, on its way, and here.
PIXEL_BYTES: Final = 3 * 3
DECODING_BYTES: Final = PIXEL_BYTES * MOST_PIXELS
_FORMATS: Final = "give a whole file in PNG, JPEG, WebP or GIF"
# The largest image in four channels, its copy in three, turned, and as bytes.
_LIMITS: Final = Limits(memory_bytes=640 << 20, cpu_s=10.0)
_PREPARE: Final = Limits(memory_bytes=512 << 20, cpu_s=20.0)  # importing Pillow


class ImageDecoder:
    """Decodes one image at a time, in one child process.  Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._sandbox = _sandbox()

    def size(self, image: bytes) -> tuple[int, int]:
        """Width and height that a file says it has.  Raises as `pixels`."""
        said = self._asked(image, decodes=False).message
        return int(said["width"]), int(said["height"])

    def pixels(self, image: bytes) -> torch.Tensor:
        """Pixels of a file: uint8 [height, width, 3].

        Raises RequestError, BudgetError where the process that decodes is killed, ConfigError.
        """
        reply = self._asked(image, decodes=True)
        shape = int(reply.message["height"]), int(reply.message["width"]), 3
        if len(reply.blob) != shape[0] * shape[1] * 3 or len(reply.blob) > 3 * MOST_PIXELS:
            raise RequestError(f"an image cannot be decoded: {_FORMATS}")
        return torch.from_numpy(np.frombuffer(reply.blob, np.uint8).copy().reshape(shape))

    def rest(self) -> bool:
        """End the child process; the next image starts another.  False while it decodes."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._sandbox.close()
            self._worker, self._sandbox = None, _sandbox()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        """End the child process."""
        self._sandbox.close()

    def _asked(self, image: bytes, *, decodes: bool) -> Reply:
        for again in (True, False):
            try:
                with self._lock:
                    if self._worker is None or self._worker.ended:
                        self._worker = self._sandbox.fork()
                    return self._worker.call({"decodes": decodes}, image)
            except Refused as error:
                raise _refusal(error) from None
            except (Ended, Lost) as error:
                if isinstance(error, Ended) and not error.killed:
                    raise RequestError(f"an image cannot be decoded: {error}; {_FORMATS}") from None
                # The process was killed from outside, maybe while it had nothing to do.
                if not again:
                    raise BudgetError(
                        "an image cannot be decoded now, since the process that decodes was "
                        "killed twice, as systems do without memory: try again later"
                    ) from None
        raise AssertionError


def _sandbox() -> Sandbox:
    return Sandbox(
        "hmt.sandbox.image_decoding:Images",
        {"most_pixels": MOST_PIXELS},
        prepare=_PREPARE,
        worker=_LIMITS,
    )


def _refusal(error: Refused) -> Exception:
    if error.kind == "pixels":
        width, height = error.more.get("width"), error.more.get("height")
        has = f"{width} x {height}" if width else f"more than {2 * MOST_PIXELS}"
        return RequestError(
            f"an image has {has} pixels; the most is {MOST_PIXELS} in all: make it smaller"
        )
    if error.kind == "format":
        return RequestError(f"an image cannot be decoded: {_FORMATS}")
    if error.more.get("type") in ("ModuleNotFoundError", "ImportError"):
        return ConfigError(
            "images are decoded by Pillow, which is not installed: pip install hmt[images]"
        )
    return MachineError(f"images cannot be decoded: {error}")


def file_bytes(
    image: ImageInput, kind: str = "image", most_bytes: int = MOST_FILE_BYTES
) -> bytes | None:
    """The file of an image, or other `kind`; None where it is a PIL.Image.  Raises RequestError."""
    if isinstance(image, bytes):
        data = image
    elif isinstance(image, (str, PathLike)):
        data = _read(Path(image).expanduser(), kind, most_bytes)
    elif hasattr(image, "convert") and hasattr(image, "tobytes"):
        return None
    else:
        raise RequestError(
            f"an image is {type(image).__name__}; give a path, the bytes of a file, or a PIL.Image"
        )
    if len(data) > most_bytes:
        article = "an" if kind == "image" else "a"
        raise RequestError(
            f"{article} {kind} file has {format_bytes(len(data))}; the most is "
            f"{format_bytes(most_bytes)}: make it smaller"
        )
    return data


def pixels_of(image: Any) -> torch.Tensor:
    """Pixels of a PIL.Image, which the caller has decoded: uint8 [height, width, 3]."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise RequestError(
            f"an image has {width} x {height} pixels; the most is {MOST_PIXELS} in all: make it "
            "smaller"
        )
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy())


def _read(path: Path, kind: str, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        whole = "a file in PNG, JPEG, WebP or GIF" if kind == "image" else "one that can be"
        raise RequestError(
            f"the {kind} {path} cannot be read ({os_reason(error)}): give {whole}"
        ) from error
