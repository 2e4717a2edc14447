"""Images and videos of requests: prepared on callers' threads, encoded where a step needs one."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from hmt.base.errors import BudgetError, RequestError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.image import (
    ImageEncoder,
    ImageFeatures,
    ImageInput,
    PreparedImage,
    VideoInput,
)
from hmt.contracts.step import SchedulerOutput, Step
from hmt.contracts.store import Priority, Weights
from hmt.engine.config import EngineConfig
from hmt.engine.loading.device import OnDevice
from hmt.engine.loading.prepared import Prepared
from hmt.memory import Account, HostPool
from hmt.models.vision import PIXEL_BYTES, ImageDecoder, VideoDecoder, file_bytes, pixels_of
from hmt.planner import encoder_remark
from hmt.weights import DeviceEncoder, WeightStore, WeightsView

MOST_IMAGES: Final = 64  # of one request
MOST_VIDEOS: Final = 8
_AHEAD: Final = 2  # parts of an encoder that are read from the disk while one computes
_LEAST_WAIT_S: Final = 0.01  # between looks while the decoder is asked for an image's size


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """The blocks of an image encoder, and what they pass through while they are in memory.

    device      what a GPU has of them; None: the CPU encodes all images
    work_bytes  of the GPU's memory, that encoding an image may take there
    """

    blocks: Sequence[BlockId]
    weights: WeightStore
    slots: HostPool
    device: DeviceEncoder | None = None
    work_bytes: int = 0

    def encodes_on_device(self, image: PreparedImage) -> bool:
        """Whether a GPU encodes it.  For any thread."""
        return self.device is not None and image.device_bytes <= self.work_bytes

    @contextmanager
    def leasing(self, image: PreparedImage) -> Iterator[Weights]:
        """Weights whose leases are where `image` is encoded."""
        if self.device is None or not self.encodes_on_device(image):
            yield WeightsView(self.weights, other_lease=self._lease_ahead)
            return
        with self.device.leasing():
            yield WeightsView(self.weights, other_lease=self.device.lease)

    def _lease_ahead(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        """The store's lease, with the next blocks asked for."""
        following = self.blocks.index(block) + 1
        self.weights.request(self.blocks[following : following + _AHEAD], Priority.PREFETCH)
        return self.weights.lease(block)

    def free(self) -> None:
        """Return their memory to the system.  No lease of them may be held."""
        for block in self.blocks:
            self.weights.forget(block)
        self.slots.trim()
        if self.device is not None:
            self.device.free()


class ImageHold:
    """Images that a request keeps; they go when this does."""


class ImageStore:
    """Prepared images of requests that have not ended, and features of those encoded by now.

    All of it, and what encoding takes, is charged to an account before it is taken: while a file is
    decoded by the size that it says it has.  `hold` is for any thread, `features` for the engine's.

    remark   why the CPU encodes them beside a GPU, for people; "" where it does not
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        account: Account,
        tower: TowerMemory,
        unload_after_s: float | None = None,
    ) -> None:
        """`unload_after_s` without an image the tower is freed; None: when others need the room."""
        self.remark = ""
        self._encoder = encoder
        self._account = account
        self._tower = tower
        self._unload_after_s = unload_after_s
        self._decoder = ImageDecoder()
        self._videos = VideoDecoder()
        self._lock = threading.RLock()  # a hold may go while it is taken
        self._images: dict[str, PreparedImage] = {}
        self._uses: Counter[str] = Counter()
        self._features: dict[str, ImageFeatures] = {}
        self._decoding: Counter[int] = Counter()  # images that are decoded now, by bytes
        self._used_at: float | None = None  # None: since all was freed, not once
        self._closed = False

    @property
    def videos_refused(self) -> str:
        """Why the model takes no videos; "" where it does."""
        return self._encoder.videos_refused

    def hold(
        self, images: Sequence[ImageInput], videos: Sequence[VideoInput] = ()
    ) -> tuple[list[PreparedImage], ImageHold]:
        """Prepare images and videos, which stay as long as the hold.

        Raises RequestError for what is no image or can never be encoded in this budget, BudgetError
        where others' images leave no room now.
        """
        if len(images) > MOST_IMAGES:
            raise RequestError(f"{len(images)} images were given; a request may have {MOST_IMAGES}")
        if len(videos) > MOST_VIDEOS:
            raise RequestError(f"{len(videos)} videos were given; a request may have {MOST_VIDEOS}")
        hold, keys = ImageHold(), list[str]()
        weakref.finalize(hold, self._release, keys).atexit = False
        prepared = []
        parts = [(image, False) for image in images] + [(video, True) for video in videos]
        for part, is_video in parts:
            made = (self._prepared_video if is_video else self._prepared)(part, keys)
            with self._lock:
                self._uses[made.key] += 1  # first: a hold may go at any time
                keys.append(made.key)
                known = self._images.setdefault(made.key, made)
                kind = "a video" if made.video else "an image"
                self._settle(f"{kind} of {made.tokens} tokens", keys)
            prepared.append(known)
        return prepared, hold

    def features(self, key: str) -> ImageFeatures:
        """Of an image that a request holds.  Encodes it if it has not been."""
        with self._lock:
            found, image = self._features.get(key), self._images[key]
        if found is None:
            with self._tower.leasing(image) as weights:
                found = self._encoder.encode(image, weights)
            with self._lock:
                if key in self._images:
                    self._features[key] = found
        return found

    def encode(self, output: SchedulerOutput) -> dict[int, Exception]:
        """Encode what `output` needs.  By request, why its images cannot be."""
        errors: dict[str, Exception] = {}
        failed: dict[int, Exception] = {}
        for segment in output.segments:
            for span in segment.images:
                if span.key not in errors:
                    try:
                        self.features(span.key)
                    except Exception as error:  # of the disk, or of a model's own code
                        errors[span.key] = error
                if span.key in errors:
                    failed.setdefault(segment.request, errors[span.key])
        return failed

    def fill(self, step: Step, output: SchedulerOutput) -> Step:
        """`step` with features of the images that tokens of `output` stand for.  Encodes these."""
        rows: list[torch.Tensor] = []
        features: list[torch.Tensor] = []
        layers: list[tuple[torch.Tensor, ...]] = []
        for segment, run in zip(output.segments, step.segments, strict=True):
            for span in segment.images:
                found = self.features(span.key)
                begin, part = run.offset + span.offset, slice(span.first, span.first + span.length)
                rows.append(torch.arange(begin, begin + span.length))
                features.append(found.rows[part])
                layers.append(tuple(layer[part] for layer in found.layers))
        if not rows:
            return step
        return replace(
            step,
            image_rows=torch.cat(rows),
            image_features=torch.cat(features),
            layer_features=tuple(torch.cat(parts) for parts in zip(*layers, strict=True)),
        )

    def unload_idle(self) -> None:
        """Free the tower, and end the process that decodes, if no image was there for long enough.

        The next image loads it again.  For the engine's thread, between steps.
        """
        after_s = self._unload_after_s
        if after_s is None:
            return
        with self._lock:
            idle_s = self._idle_s()
            if idle_s is None or idle_s < after_s:
                return
            if not (self._decoder.rest() and self._videos.rest()):
                return
            self._used_at = None
        self._tower.free()

    def wait_s(self) -> float | None:
        """Seconds until `unload_idle` may have something to do; None: it never has.

        As images come on callers' threads, which do not wake the engine's, it looks each time.
        """
        after_s = self._unload_after_s
        if after_s is None:
            return None
        with self._lock:
            idle_s = self._idle_s()
        return after_s if idle_s is None else max(_LEAST_WAIT_S, after_s - idle_s)

    def close(self) -> None:
        """Let all go."""
        with self._lock:
            self._closed = True
            for kept in (self._images, self._uses, self._features, self._decoding):
                kept.clear()
            self._settle("")
        self._decoder.close()
        self._videos.close()

    def _prepared(self, image: ImageInput, own: Sequence[str]) -> PreparedImage:
        data = file_bytes(image)
        width, height = image.size if data is None else self._decoder.size(data)
        what = f"an image of {width} x {height} pixels"
        if self._tower.device is not None:
            self._tower.device.reserve()
        with self._room(PIXEL_BYTES * width * height, what, own):
            pixels = pixels_of(image) if data is None else self._decoder.pixels(data)
            return self._encoder.prepare(pixels)

    def _prepared_video(self, video: VideoInput, own: Sequence[str]) -> PreparedImage:
        with self._videos.opened(video, self._decoder) as source:
            size = source.height, source.width
            chosen = self._encoder.choose(source.frames, source.fps, size, sampled=source.sampled)
            what = f"a video of {len(chosen.indices)} frames of {size[1]} x {size[0]} pixels"
            if self._tower.device is not None:
                self._tower.device.reserve()
            # One frame is decoded at a time.
            with self._room(PIXEL_BYTES * size[0] * size[1] + chosen.nbytes, what, own):
                frames = (source.frame(index) for index in chosen.indices)
                return self._encoder.prepare_video(frames, chosen)

    @contextmanager
    def _room(self, nbytes: int, what: str, own: Sequence[str]) -> Iterator[None]:
        with self._lock:
            self._decoding[nbytes] += 1
            try:
                self._settle(what, own)
            except BaseException:
                self._decoding[nbytes] -= 1
                raise
        try:
            yield
        finally:
            with self._lock:
                self._decoding[nbytes] -= 1
                self._settle("")

    def _release(self, keys: list[str]) -> None:
        with self._lock:
            if self._closed:
                return
            for key in keys:
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key], self._images[key]
                    self._features.pop(key, None)
            self._settle("")

    def _idle_s(self) -> float | None:
        """Seconds since the last image went; 0 while there are any, None once all was freed."""
        if self._images or self._decoding.total():
            return 0.0
        return None if self._used_at is None else time.monotonic() - self._used_at

    def _settle(self, what: str, own: Sequence[str] = ()) -> None:
        """Let the account say what is held.

        Raises RequestError where `what` is new does not fit beside the request's `own` images,
        BudgetError where it does not beside others.

        Images are encoded one after the other, so that the work of one is held, unless a GPU does
        it: there the plan has counted what it takes.
        """
        if self._closed and what:
            raise BudgetError("the model was closed while an image was prepared")
        self._used_at = time.monotonic()
        images = list(self._images.values())
        held = sum(image.nbytes + image.feature_bytes for image in images)
        on_host = (image for image in images if not self._tower.encodes_on_device(image))
        held += max((image.work_bytes for image in on_host), default=0)
        held += sum(nbytes * count for nbytes, count in self._decoding.items())
        more = held - self._account.used_bytes
        if more <= 0:
            self._account.release(-more)
        elif not self._account.try_charge(more):
            most = self._account.limit_bytes
            said = f"{what} takes {format_bytes(more)} more of the {format_bytes(most)} for images"
            if self._images.keys() <= set(own) and self._decoding.total() <= 1:
                raise RequestError(f"{said}: make it smaller, or raise --host-memory")
            raise BudgetError(f"{said}, of which others hold the rest: try again later")


def open_images(
    prepared: Prepared,
    config: EngineConfig,
    accounts: Mapping[str, Account],
    weights: WeightStore,
    slots: HostPool,
    on_devices: Sequence[OnDevice],
    stack: ExitStack,
) -> ImageStore | None:
    """What holds images of requests; None for a model that sees none.  Closed by `stack`."""
    encoder = prepared.model.encoder
    if encoder is None:
        return None
    blocks = [block.id for block in prepared.demand.vision]
    tower = TowerMemory(blocks, weights, slots)
    reserved = prepared.plan.device.reserved
    if on_devices and "encoder" in reserved:
        on_device = on_devices[0]
        account = next(one for one in on_device.accounts if one.purpose == "encoder")
        device = DeviceEncoder(blocks, prepared.layouts, weights, on_device.device, account)
        stack.callback(device.free)
        tower = replace(tower, device=device, work_bytes=reserved["activations"])
    images = ImageStore(encoder, accounts["images"], tower, config.idle_unload_s)
    images.remark = encoder_remark(prepared.plan, prepared.demand)
    stack.callback(images.close)
    return images


def with_image_parts(
    messages: Sequence[Mapping[str, Any]], images: int, videos: int = 0
) -> list[Mapping[str, Any]]:
    """Messages of a chat with a part for each of so many images and videos.

    Those of a kind are as they are where they have any; else in front of what the user has said
    last, images first.
    """
    held = list(messages)
    for kind, count in (("video", videos), ("image", images)):
        parts = [p for message in held for p in _parts(message) if p.get("type") == kind]
        users = [number for number, message in enumerate(held) if message.get("role") == "user"]
        if parts or not users or not count:
            continue
        last = held[users[-1]]
        text = _parts(last) or [{"type": "text", "text": last.get("content", "")}]
        held[users[-1]] = {**last, "content": [{"type": kind}] * count + text}
    return held


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
