"""How many frames an animation has, and how long it lasts, without decoding one.

GIF89a, WebP (RFC 9649) and PNG (third edition, "Animated PNG").  Pillow tells the frames of a GIF
after it has read all of them, and durations only of frames that it has decoded.
"""

from dataclasses import dataclass
from typing import Final

from hmt.sandbox.refusal import Refusal

_LEAST_S: Final = 0.011  # of a frame; browsers show those that say less for
_USUAL_S: Final = 0.1


@dataclass(slots=True)
class Animation:
    """What a file says of its frames.

    first   number of the first in Pillow's count: an APNG's default image may not belong to it
    """

    frames: int = 0
    seconds: float = 0.0
    first: int = 0

    def add(self, seconds: float, most: int) -> None:
        """A frame that is shown so long.  Raises Refusal of kind "frames" behind `most`."""
        self.frames += 1
        self.seconds += seconds if seconds >= _LEAST_S else _USUAL_S
        if self.frames > most:
            raise Refusal("frames", "", most=most)


def animation_in(data: bytes, most: int) -> Animation | None:
    """Of a file of at most so many frames; None where it is none of the three formats.

    Raises Refusal of kinds "frames", and "format" where it ends within a frame.
    """
    for begin, read in ((b"GIF8", _gif), (b"\x89PNG\r\n\x1a\n", _png), (b"RIFF", _webp)):
        if data.startswith(begin) and (read is not _webp or data[8:12] == b"WEBP"):
            found = Animation()
            try:
                read(data, found, most)
            except IndexError:
                raise Refusal("format", "") from None
            found.frames = found.frames or 1  # an image that does not move
            return found
    return None


def _gif(data: bytes, found: Animation, most: int) -> None:
    place, delay = 13 + _table_bytes(data[10]), 0
    while place < len(data) and data[place] != 0x3B:  # the trailer, which some files lack
        if data[place] == 0x21:  # an extension; a graphic control tells of the next frame
            if data[place + 1] == 0xF9:
                delay = int.from_bytes(data[place + 4 : place + 6], "little")
            place += 2
        elif data[place] == 0x2C:
            found.add(delay / 100, most)
            place, delay = place + 11 + _table_bytes(data[place + 9]), 0
        else:
            raise Refusal("format", "")
        while size := data[place]:
            place += 1 + size
        place += 1


def _table_bytes(flags: int) -> int:
    """Of the color table that a GIF's flags tell of."""
    return 3 * (2 << (flags & 7)) if flags & 0x80 else 0


def _png(data: bytes, found: Animation, most: int) -> None:
    place, moves = 8, False
    while place < len(data):
        size, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if kind == b"acTL":
            moves = True
        elif kind == b"fcTL" and moves:
            over, under = (
                int.from_bytes(data[place + 8 + at : place + 10 + at], "big") for at in (20, 22)
            )
            found.add(over / (under or 100), most)
        elif kind == b"IDAT" and moves and not found.frames:
            found.first = 1
        elif kind == b"IEND":
            return
        place += 12 + size
    raise Refusal("format", "")


def _webp(data: bytes, found: Animation, most: int) -> None:
    place, end = 12, 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise Refusal("format", "")
    while place < end:
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] == b"ANMF":
            found.add(int.from_bytes(data[place + 20 : place + 23], "little") / 1000, most)
        place += 8 + size + size % 2
