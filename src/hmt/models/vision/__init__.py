"""Images and videos: decoded in limited processes, encoded by towers with leased weights."""

from hmt.models.vision.decoding import PIXEL_BYTES, ImageDecoder, file_bytes, pixels_of
from hmt.models.vision.opening import IMAGES_REFUSED, with_vision
from hmt.models.vision.video_decoding import VideoDecoder, video_bytes
