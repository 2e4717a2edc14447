"""Decoding images, in a child process: files of strangers, and decoders in C.

Formats: PNG (RFC 2083), JPEG (ITU-T T.81), WebP (RFC 9649), and the first frame of GIF89a.
"""

import io
import warnings
from typing import Any, Final

from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from hmt.sandbox.refusal import Refusal

# What opens each.  Pillow's own opener of JPEG may hand files on to others of its plugins.
_OPENERS: Final = {
    opener.format: opener
    for opener in (
        GifImagePlugin.GifImageFile,
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
    )
}


class Images:
    """A role: a worker tells the size of an image, and decodes it."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        """`settings` has "most_pixels", that an image may have."""
        self._most_pixels: int = settings["most_pixels"]
        confine_pillow(self._most_pixels)

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """{"decodes": false}: the answer has "width" and "height" of the image in `blob`.

        {"decodes": true}: also its pixels, uint8 [height, width, 3], turned as the file says.

        Transparent pixels have the color that the file gives them.  Raises Refusal of kinds
        "format", for what is none of the four or damaged, and "pixels".
        """
        try:
            with Image.open(io.BytesIO(blob), formats=tuple(_OPENERS)) as image:
                width, height = image.size
                if width * height > self._most_pixels:
                    raise Refusal("pixels", "", width=width, height=height)
                if not message["decodes"]:
                    return {"width": width, "height": height}, b""
                turned = in_rgb(ImageOps.exif_transpose(image))
                size = {"width": turned.width, "height": turned.height}
                return size, turned.tobytes()
        except (Refusal, MemoryError):
            raise
        except Image.DecompressionBombError as error:
            raise Refusal("pixels", "") from error
        except Exception as error:  # of decoders: OSError, SyntaxError, struct.error, ...
            raise Refusal("format", "") from error


def confine_pillow(most_pixels: int) -> None:
    """Let Pillow, in this process, open the four formats alone, and images of `most_pixels`."""
    Image.MAX_IMAGE_PIXELS = most_pixels  # above twice as many, `open` itself refuses
    warnings.simplefilter("ignore")  # of fewer, which callers refuse
    Image.preinit()
    for name in set(Image.ID) - _OPENERS.keys():
        Image.ID.remove(name)
        del Image.OPEN[name]
    for name, opener in _OPENERS.items():
        Image.OPEN[name] = opener, Image.OPEN[name][1]


def in_rgb(image: Image.Image) -> Image.Image:
    """An image in three channels.

    Gray of 16 bits becomes gray of 8 first, whose upper ones `convert` would make white.
    """
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGB")
