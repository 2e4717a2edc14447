"""Image files of strangers: decoded, or refused in few words, by a process that survives them."""

import io
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from vision_models import file_of, picture

from hmt.base.errors import HMTError, RequestError
from hmt.models.vision import ImageDecoder, decoding
from hmt.models.vision.decoding import MOST_PIXELS
from hmt.sandbox import Limits

PICTURE = picture(61, 34)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder()
    yield made
    made.close()


def pixels(image: Image.Image) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_four_formats(decoder: ImageDecoder, kind: str) -> None:
    data = file_of(PICTURE, kind)
    assert decoder.size(data) == PICTURE.size
    found = decoder.pixels(data)
    assert torch.equal(found, pixels(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16"])
def test_other_colors_become_red_green_and_blue(decoder: ImageDecoder, mode: str) -> None:
    image = PICTURE.convert("L").convert("I").convert(mode) if mode == "I;16" else None
    image = image or PICTURE.convert(mode)
    found = decoder.pixels(file_of(image))
    assert found.shape == (34, 61, 3) and found.dtype == torch.uint8


def test_an_image_is_turned_as_its_file_says_and_moves_no_further(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    data = io.BytesIO()
    PICTURE.save(data, "JPEG", exif=exif)
    assert decoder.pixels(data.getvalue()).shape == (61, 34, 3)
    moving = io.BytesIO()
    frames = [PICTURE.convert("P"), picture(61, 34, 5).convert("P")]
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    assert torch.equal(decoder.pixels(moving.getvalue()), pixels(frames[0]))


def test_other_formats_are_none(decoder: ImageDecoder) -> None:
    for kind in ("BMP", "TIFF", "PPM", "ICO"):
        with pytest.raises(RequestError, match="PNG, JPEG, WebP or GIF"):
            decoder.pixels(file_of(PICTURE, kind))


def bomb(width: int, height: int) -> bytes:
    """A small PNG of black pixels."""
    rows = zlib.compress(bytes((width * 3 + 1) * 64), 9)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", rows),
        (b"IEND", b""),
    ]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def test_huge_images_are_refused_by_their_header(decoder: ImageDecoder) -> None:
    for width, height in ((1 << 16, 1 << 16), (MOST_PIXELS // 8 + 1, 8), (2**31 - 1, 2**31 - 1)):
        with pytest.raises(RequestError):
            decoder.pixels(bomb(width, height) if width < 1 << 20 else header(width, height))


def header(width: int, height: int) -> bytes:
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))


def test_damaged_files_end_no_process(decoder: ImageDecoder) -> None:
    rng = random.Random(5)
    files = [file_of(PICTURE, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    worker = decoder._worker
    for number in range(400):
        data = bytearray(files[number % 4])
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if number % 3 == 0:
            del data[rng.randrange(len(data)) :]
        try:
            found = decoder.pixels(bytes(data))
            assert found.shape[2] == 3
        except HMTError as error:
            assert isinstance(error, RequestError) and len(str(error)) < 300
    assert torch.equal(decoder.pixels(files[0]), pixels(PICTURE))
    assert worker is None or decoder._worker is worker


def test_a_process_that_is_killed_fails_no_image(decoder: ImageDecoder) -> None:
    data = file_of(PICTURE)
    decoder.size(data)
    assert decoder._worker is not None and decoder._sandbox._process is not None
    for pid in (decoder._worker._pid, decoder._sandbox._process.pid):
        worker = decoder._worker
        os.kill(pid, signal.SIGKILL)
        assert torch.equal(decoder.pixels(data), pixels(PICTURE))
    while not worker.ended:  # it ends with the first process, and may have answered before
        time.sleep(0.001)
    decoder.size(data)
    worker = decoder._worker
    os.kill(worker._pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decoder.pixels, data)
        while not worker._asked:  # it has begun
            time.sleep(0.001)
        os.kill(worker._pid, signal.SIGKILL)
        assert torch.equal(answer.result(), pixels(PICTURE))


def test_what_takes_too_much_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_LIMITS", Limits(memory_bytes=24 << 20, cpu_s=10.0))
    decoder = ImageDecoder()
    large, small = file_of(Image.new("RGB", (4000, 4000))), file_of(PICTURE)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"more than 24\.0 MiB of memory"):
            decoder.pixels(large)
        assert torch.equal(decoder.pixels(small), pixels(PICTURE))
    decoder.close()
