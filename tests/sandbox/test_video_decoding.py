"""Video files of strangers: decoded frame by frame, or refused in few words."""

import io
import random
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image
from video_models import animation, frames, pixels_of
from vision_models import file_of

from hmt.base.errors import HMTError, RequestError
from hmt.contracts.image import Video
from hmt.models.vision import ImageDecoder, VideoDecoder
from hmt.sandbox.animations import animation_in

FRAMES = frames(7, 37, 21, 1)
MIB = 1 << 20


class Decoders:
    """Both of them, and what they make of one video."""

    def __init__(self) -> None:
        self.videos, self.images = VideoDecoder(), ImageDecoder()

    def all_of(self, video: Any) -> tuple[torch.Tensor, float]:
        """Every frame, and how many there are in a second."""
        with self.videos.opened(video, self.images) as source:
            found = [source.frame(index) for index in range(source.frames)]
            assert all(frame.numel() <= source.height * source.width * 3 for frame in found)
            return (
                torch.stack(found) if len({f.shape for f in found}) == 1 else found[0]
            ), source.fps


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders()
    yield made
    made.videos.close()
    made.images.close()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_decoded_as_pillow_does(decoders: Decoders, kind: str) -> None:
    """A still is one frame; an APNG's default image is none where it does not belong to it."""
    data = animation(FRAMES, [20, 30, 50, 100, 10, 400, 90], kind, lossless=True)
    found, fps = decoders.all_of(data)
    assert torch.equal(found, pixels_of(data))
    # Browsers show frames for 100 ms that say 10 or fewer.
    assert fps == pytest.approx(7 / 0.79)
    assert len(decoders.all_of(file_of(FRAMES[0], kind))[0]) == 1
    if kind == "PNG":
        apart = animation(FRAMES, 100, kind, default_image=True)
        assert torch.equal(decoders.all_of(apart)[0], pixels_of(apart)[1:])


def test_images_are_frames_and_a_rate_can_be_given(decoders: Decoders) -> None:
    files = [file_of(frame) for frame in FRAMES]
    for given in (FRAMES, files, [FRAMES[0], *files[1:]]):
        found, fps = decoders.all_of(given)
        assert torch.equal(found, pixels_of(FRAMES)) and fps == 24
    assert decoders.all_of(Video(FRAMES, fps=3))[1] == 3
    assert decoders.all_of(Video(animation(FRAMES, 100), fps=5))[1] == 5


def container(kind: str, codec: str) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 36, 22, "yuv420p"
        for frame in frames(12, 36, 22, 3):
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode(None))
    return out.getvalue()


def test_containers_are_decoded_by_pyav_or_it_is_named(decoders: Decoders) -> None:
    if find_spec("av") is None:
        for head in (b"\0\0\0\x20ftypisom", b"\x1a\x45\xdf\xa3"):
            with pytest.raises(RequestError, match=r"PyAV .* pip install 'hmt\[video\]'"):
                decoders.all_of(head + bytes(64))
        return
    import av

    for kind, codec in (("mp4", "mpeg4"), ("webm", "libvpx-vp9")):
        data = container(kind, codec)
        found, fps = decoders.all_of(data)
        with av.open(io.BytesIO(data)) as file:
            wanted = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert fps == 10 and len(found) == len(wanted) == 12
        assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(found, wanted, strict=True))
        # Of WebM that ends early there are as many frames as came.
        for broken in (data[:40], *[data[: len(data) // 2]][: kind == "mp4"]):
            with pytest.raises(RequestError, match="cannot be decoded"):
                decoders.all_of(broken)


def memory_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def one_of(number: int) -> bytes:
    """A GIF of so many small frames."""
    still = file_of(Image.new("P", (4, 4)), "GIF")
    at = still.index(b"\x2c")
    return still[:at] + still[at:-1] * number + b"\x3b"


def test_what_is_too_much_is_refused_before_it_is_decoded(decoders: Decoders) -> None:
    huge = bytearray(animation(FRAMES, 100))
    huge[6:10] = struct.pack("<HH", 65000, 65000)
    before = memory_bytes()
    for data, said in (
        (one_of(100_000), "more than 65536 frames"),
        (bytes(huge), "the most is 16777216"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "cannot be decoded"),
        (b"RIFF\x20\0\0\0AVI LIST", "cannot be decoded"),
        (file_of(FRAMES[0], "JPEG"), "cannot be decoded"),
    ):
        with pytest.raises(RequestError, match=said):
            decoders.all_of(data)
    assert memory_bytes() - before < 64 * MIB
    assert animation_in(one_of(65536), 65536) is not None


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.whole)])
def test_damaged_animations_end_no_process_and_leave_nothing(
    decoders: Decoders, count: int
) -> None:
    rng, before = random.Random(5), 0
    small = frames(4, 9, 7, 2)
    whole = [animation(small, 100, kind, lossless=True) for kind in ("GIF", "WEBP", "PNG")]
    for number in range(count):
        data = bytearray(rng.choice(whole))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randrange(1, 6)):
            if data:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        try:
            found, fps = decoders.all_of(bytes(data))
            assert found.dtype == torch.uint8 and 0 < fps <= 1000
        except HMTError as error:
            assert isinstance(error, RequestError) and len(str(error)) < 160, error
            assert "it takes" not in str(error) and "process" not in str(error)
        if number == count // 3:
            before = memory_bytes()
    assert memory_bytes() - before < 32 * MIB
    assert torch.equal(decoders.all_of(whole[0])[0], pixels_of(whole[0]))
