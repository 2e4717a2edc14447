"""Image files that strangers could send: truncated, damaged, lying, huge, odd.  From a seed."""

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageCms
from vision_models import file_of, picture

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
PICTURE = picture(61, 34)


@dataclass(frozen=True)
class Hostile:
    """A file.  fine: it must be decoded, to the pixels that Pillow itself makes of it."""

    name: str
    data: bytes
    fine: bool = False


def hostile_images(count: int, seed: int = 7) -> Iterator[Hostile]:
    """So many files, the same ones for a seed; of any hundred in a row each kind has its share."""
    rng = random.Random(seed)
    for number in range(count):
        make = _MAKERS[number % len(_MAKERS)]
        yield make(rng, number)


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


@cache
def _bases() -> dict[str, bytes]:
    """Good files of several kinds, by name."""
    frames = [picture(40, 30, seed) for seed in range(4)]
    gray = PICTURE.convert("L")
    wide = Image.frombytes("I;16", (8, 8), bytes(range(128)))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    moving = {"save_all": True, "append_images": frames[1:], "duration": 50}
    plain = {f"plain {kind}": file_of(PICTURE, kind) for kind in KINDS}
    turned = {}
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        for kind in ("JPEG", "PNG", "WEBP"):
            turned[f"turned by {turn} {kind}"] = _saved(PICTURE, kind, exif=exif)
    return plain | turned | {
        "cmyk JPEG": _saved(PICTURE.convert("CMYK"), "JPEG"),
        "progressive JPEG": _saved(PICTURE, "JPEG", progressive=True, restart_marker_blocks=2),
        "gray JPEG": _saved(gray, "JPEG"),
        "profile JPEG": _saved(PICTURE, "JPEG", icc_profile=profile),
        "profile PNG": _saved(PICTURE, "PNG", icc_profile=profile),
        "bad profile PNG": _saved(PICTURE, "PNG", icc_profile=bytes(range(256)) * 8),
        "bad profile JPEG": _saved(PICTURE, "JPEG", icc_profile=b"\xff" * 70000),
        "bad profile WEBP": _saved(PICTURE, "WEBP", icc_profile=b"no profile"),
        "16 bits PNG": _saved(wide, "PNG"),
        "palette PNG": _saved(PICTURE.convert("P"), "PNG"),
        "clear palette PNG": _saved(PICTURE.convert("P"), "PNG", transparency=3),
        "one bit PNG": _saved(PICTURE.convert("1"), "PNG"),
        "clear PNG": _saved(PICTURE.convert("RGBA"), "PNG"),
        "gray and clear PNG": _saved(PICTURE.convert("LA"), "PNG"),
        "lossless WEBP": _saved(PICTURE.convert("RGBA"), "WEBP", lossless=True),
        "moving GIF": _saved(frames[0], "GIF", **moving),
        "moving PNG": _saved(frames[0], "PNG", **moving),
        "moving WEBP": _saved(frames[0], "WEBP", **moving),
        "one pixel PNG": _saved(picture(1, 1), "PNG"),
        "narrow JPEG": _saved(picture(1, 3000), "JPEG"),
    }  # fmt: skip


def _base(rng: random.Random) -> tuple[str, bytes]:
    return rng.choice(list(_bases().items()))


def _fine(rng: random.Random, number: int) -> Hostile:
    names = list(_bases())
    name = names[number // len(_MAKERS) % len(names)]
    return Hostile(name, _bases()[name], fine=name != "16 bits PNG")


def _truncated(rng: random.Random, number: int) -> Hostile:
    """Cut behind one byte after the other, in strides that no two files share."""
    name, data = list(_bases().items())[number % 4] if rng.random() < 0.5 else _base(rng)
    return Hostile(f"truncated {name}", data[: number * 7919 % len(data)])


def _damaged(rng: random.Random, number: int) -> Hostile:
    name, whole = _base(rng)
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] = rng.choice((0, 255, rng.randrange(256)))
    return Hostile(f"damaged {name}", bytes(data))


def _moved(rng: random.Random, number: int) -> Hostile:
    """A piece is missing, repeated, or another file's."""
    name, data = _base(rng)
    other, beside = _base(rng)
    begin, length = rng.randrange(len(data)), rng.randrange(1, 200)
    piece = rng.choice((b"", data[begin : begin + length] * 2, beside[begin : begin + length]))
    return Hostile(f"{name} with {other}", data[:begin] + piece + data[begin + length :])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG of these chunks behind its header."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join((_chunk(b"IHDR", header), *chunks, _chunk(b"IEND", b"")))


def _sized(rng: random.Random, number: int) -> Hostile:
    """A header that lies about the size: none, huge, or a little more."""
    sizes = (0, 1, 7, 60, 62, 255, 4096, 16383, 32767, 65535)
    width, height = rng.choice(sizes), rng.choice(sizes)
    kind = rng.choice(KINDS)
    data = bytearray(_bases()[f"plain {kind}"])
    if kind == "PNG":
        huge = rng.choice((width, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
        body = _bases()["plain PNG"][33:]
        start = png(huge, height, depth=rng.choice((1, 2, 8, 16, 3)), color=rng.randrange(8))
        return Hostile(f"PNG of {huge} x {height}", start[:33] + body)
    if kind == "GIF":
        place = rng.choice((6, data.index(b"\x2c") + 5))  # of the screen, or of the first image
        struct.pack_into("<HH", data, place, width, height)
    elif kind == "JPEG":
        struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    else:  # of a lossy frame 14 bits each, of a canvas 24 bits less one
        canvas = b"VP8X" + struct.pack("<I", 10) + bytes([rng.choice((0, 2, 16, 255)), 0, 0, 0])
        canvas += struct.pack("<I", width)[:3] + struct.pack("<I", height)[:3]
        if rng.random() < 0.5:
            data[12:12] = canvas
            struct.pack_into("<I", data, 4, len(data) - 8)
        else:
            struct.pack_into("<HH", data, 26, width & 0x3FFF, height & 0x3FFF)
    return Hostile(f"{kind} of {width} x {height}", bytes(data))


def _other_type(rng: random.Random, number: int) -> Hostile:
    """What is no image of the four, or begins like one."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zeros", bytes(1 << 20))
    starts = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\x00\x00\x00\x00WEBP", b"GIF89a", b"")
    bodies = (
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        *(_saved(PICTURE, kind) for kind in ("BMP", "TIFF", "PPM", "ICO")),
        packed.getvalue(), b"\x7fELF" + bytes(99), b"#!/bin/sh\nreboot\n", b"", b"\x00" * 5000,
        rng.randbytes(rng.randrange(1, 4000)), b"AAAA" * 2000, b"\x00\x00\x00\x20ftypavif" * 9,
    )  # fmt: skip
    start, body = rng.choice(starts), rng.choice(bodies)
    return Hostile(f"{start[:4]!r} and {body[:8]!r}", start + body)


def _polyglot(rng: random.Random, number: int) -> Hostile:
    """A good image with something behind it, which stays unread."""
    name, data = rng.choice([one for one in _bases().items() if one[0].startswith("plain")])
    behind = rng.choice((b"<script>alert(1)</script>", b"PK\x03\x04" + bytes(999), b"\xff\xd8\xff"))
    return Hostile(f"{name} and more", data + behind * rng.randrange(1, 50), fine=True)


def _deflated(count: int) -> bytes:
    return zlib.compress(bytes(count), 1)


def _bomb(rng: random.Random, number: int) -> Hostile:
    """A few bytes that become many: text, profiles, pixels, frames, scans."""
    image = _chunk(b"IDAT", _deflated(25 * 8))
    which = number // len(_MAKERS) % 8
    zeros = _deflated(8 << 20)
    if which == 0:
        return Hostile("text bomb", png(8, 8, _chunk(b"zTXt", b"a\0\0" + zeros), image))
    if which == 1:
        return Hostile("profile bomb", png(8, 8, _chunk(b"iCCP", b"a\0\0" + zeros), image))
    if which == 2:
        text = _chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zeros)
        return Hostile("international text bomb", png(8, 8, text * 3, image))
    if which == 3:
        return Hostile("more pixels than it has room for", png(8, 8, _chunk(b"IDAT", zeros)))
    if which == 4:
        side = 5000 if number < 200 else 1000
        rows = _chunk(b"IDAT", _deflated((3 * side + 1) * side))
        return Hostile("a large black image", png(side, side, rows), fine=True)
    if which == 5:
        frames = [Image.new("P", (64, 64), color % 256) for color in range(300)]
        return Hostile("300 frames", _saved(frames[0], "GIF", save_all=True,
                                            append_images=frames[1:]), fine=True)  # fmt: skip
    if which == 6:
        data = _bases()["progressive JPEG"]
        scans = data.index(b"\xff\xda"), data.rindex(b"\xff\xda")
        repeated = data[: scans[1]] + data[scans[1] : -2] * 300 + data[-2:]
        return Hostile("300 scans", repeated)
    return Hostile("300 empty chunks", png(8, 8, *[_chunk(b"IDAT", b"")] * 300, image))


def _exif(rng: random.Random, number: int) -> Hostile:
    """Metadata of cameras that points anywhere, and in circles."""
    entry = struct.pack("<HHII", 0x0112, rng.choice((3, 4, 7, 13, 99)), rng.choice((1, 1 << 31)),
                        rng.choice((8, 3, 0xFFFFFFFF)))  # fmt: skip
    count = rng.choice((1, 2, 200, 0xFFFF))
    next_one = struct.pack("<I", rng.choice((0, 8, 0xFFFFFFF0)))
    tags = b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entry * min(count, 3) + next_one
    if rng.random() < 0.5:
        return Hostile("camera data JPEG", _saved(PICTURE, "JPEG", exif=b"Exif\0\0" + tags))
    return Hostile("camera data PNG", _saved(PICTURE, "PNG", exif=tags))


# In turn, so that each has its share: of twenty, six are cut and five damaged.
_MAKERS: tuple[Callable[[random.Random, int], Hostile], ...] = (
    _truncated, _damaged, _sized, _truncated, _moved, _fine, _truncated, _damaged, _other_type,
    _exif, _truncated, _damaged, _bomb, _sized, _truncated, _damaged, _polyglot, _truncated,
    _damaged, _sized,
)  # fmt: skip
