"""Images: decoded in a limited process, encoded by transformers' towers with leased weights."""

from hmt.models.vision.decoding import PIXEL_BYTES, ImageDecoder, file_bytes, pixels_of
from hmt.models.vision.opening import IMAGES_REFUSED, with_vision
