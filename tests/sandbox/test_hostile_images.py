"""Thousands of bad images, one after the other, in one decoder."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_images import PICTURE, Hostile, hostile_images
from PIL import Image, ImageOps
from vision_models import file_of

from hmt.base.errors import RequestError
from hmt.models.vision import ImageDecoder
from hmt.models.vision.decoding import MOST_PIXELS

MIB = 1 << 20


def memory_bytes(pid: int | str) -> tuple[int, int]:
    """What a process holds beside its libraries, and the most that it held with them."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    by_name = {line.split(":")[0]: line.split() for line in lines}
    return int(by_name["RssAnon"][1]) << 10, int(by_name["VmHWM"][1]) << 10


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def check(decoder: ImageDecoder, image: Hostile) -> None:
    """It becomes the pixels that it should, some within the limits, or an error of few words."""
    try:
        found = decoder.pixels(image.data)
    except RequestError as error:
        assert not image.fine, (image.name, error)
        said = str(error)
        # Neither does it take long, nor does it end the process.
        assert "it needs" not in said and "it takes" not in said and "process" not in said, image
        assert len(said) < 150 and "Traceback" not in said
        return
    assert found.dtype == torch.uint8 and found.shape[2] == 3
    assert 0 < found.shape[0] * found.shape[1] <= MOST_PIXELS
    if image.fine:
        assert np.array_equal(found.numpy(), by_pillow(image.data)), image.name


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.whole)])
def test_hostile_images_end_no_process_and_leave_nothing(count: int) -> None:
    decoder = ImageDecoder()
    good = file_of(PICTURE)
    decoder.size(good)
    worker = decoder._worker
    assert worker is not None
    names, before = set(), 0
    for number, image in enumerate(hostile_images(count)):
        check(decoder, image)
        names.add(image.name)
        if number == count // 2:
            before = memory_bytes("self")[0]
    assert decoder._worker is worker and not worker.ended
    assert np.array_equal(decoder.pixels(good).numpy(), by_pillow(good))
    held, most = memory_bytes(worker._pid)
    assert held < 128 * MIB and most < 700 * MIB
    assert memory_bytes("self")[0] - before < 64 * MIB
    assert len(names) > count // 4
    decoder.close()


def test_gray_of_16_bits_keeps_its_shades() -> None:
    shades = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    decoder = ImageDecoder()
    found = decoder.pixels(file.getvalue())
    decoder.close()
    for channel in range(3):
        assert np.array_equal(found[..., channel].numpy(), shades >> 8)


def test_only_four_formats_are_known_to_the_child() -> None:
    from hmt.sandbox.image_decoding import Images

    before = dict(Image.OPEN), list(Image.ID), Image.MAX_IMAGE_PIXELS
    try:
        Images({"most_pixels": 100}, b"")
        assert sorted(Image.ID) == sorted(Image.OPEN) == ["GIF", "JPEG", "PNG", "WEBP"]
        assert Image.MAX_IMAGE_PIXELS == 100
    finally:
        Image.OPEN.update(before[0])
        Image.ID[:] = before[1]
        Image.MAX_IMAGE_PIXELS = before[2]
