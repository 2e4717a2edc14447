"""Videos through the engine: logits of transformers, chunks, budgets, prefixes, refusals."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from default_part import after_first
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from video_models import (
    GRIDS,
    VIDEO,
    animation,
    frames,
    prepared_by_transformers,
    video_logits,
    video_model,
)
from vision_models import BEGIN, END, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.base.errors import RequestError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Request

OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 512, "max_batch": 2}
LISTED = frames(5, 37, 21, 1)
FILE = animation(frames(13, 26, 33, 2), 100)
IMAGES = [picture(18, 50, 1)]
# Each for what others have not: times in positions, times as text, numbers as text, features of
# videos apart from those of images.
NAMES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision")
REPEATED = (
    *(name for name in GRIDS if name not in NAMES), "internvl-normed", "llava_onevision-deep",
    "llava_next_video", "llava_next_video-qwen2",
)  # fmt: skip


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(count)]


PROMPT = [
    *words(7, 1), BEGIN, VIDEO, END, *words(5, 2), BEGIN, IMAGE, END, *words(6, 3), BEGIN, VIDEO,
    END, *words(3, 4),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return video_model(name, folder), folder

    return made


@pytest.fixture(scope="module", params=["qwen3_vl"])
def loaded(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[hmt.LoadedModel]:
    _, folder = folder_of(request.param)
    options = OPTIONS | {"max_prefill_tokens": 16, "prefix_cache": True}
    with hmt.Engine(host_memory="64MiB", **options) as engine:
        yield engine.load_model(folder)


def asked(prompt: Any, videos: Any, images: Any = (), **more: Any) -> Request:
    return scored_request(prompt, tuple(images), **{"videos": tuple(videos)} | more)


def tokens_of(model: hmt.LoadedModel, request: Request) -> list[int]:
    """A prompt with all that is written in it."""
    return list(model._input.process(request, None).state.tokens)


@pytest.mark.parametrize("name", [*NAMES, *after_first(REPEATED, 0)])
def test_logits_are_those_of_transformers(name: str, folder_of: Any) -> None:
    """A list of an odd number of frames, an image and a file; chunks of 16 tokens cut them."""
    model, folder = folder_of(name)
    # transformers wants as many frames in each video of squares.
    listed = LISTED if name in GRIDS else LISTED[:4]
    request = asked(PROMPT, (hmt.Video(listed, fps=3), FILE), IMAGES)
    with hmt.Engine(host_memory="64MiB", **OPTIONS, max_prefill_tokens=16) as engine:
        loaded = engine.load_model(folder)
        answer = loaded.infer(request)
        tokens = [*tokens_of(loaded, request), *answer.token_ids]
    videos = [
        prepared_by_transformers(folder, listed, 3.0),
        prepared_by_transformers(folder, FILE, 10.0),
    ]
    wanted = video_logits(model, folder, tokens, IMAGES, videos).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(logprobs_of(answer)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl"])
def test_text_between_frames_is_that_of_transformers(name: str, folder_of: Any) -> None:
    _, folder = folder_of(name)
    made = prepared_by_transformers(folder, LISTED, 3.0)
    with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
        model = engine.load_model(folder)
        found = tokens_of(model, asked([9, VIDEO, 9], [hmt.Video(LISTED, fps=3)]))
        names = {n: model.tokenizer.backend.id_to_token(n) for n in (BEGIN, END, VIDEO, IMAGE)}
        row = names[VIDEO if name == "qwen3_vl" else IMAGE]
        own = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            vision_start_token=names[BEGIN], vision_end_token=names[END], video_token=row,
            start_image_token=names[BEGIN], end_image_token=names[END], image_token=row,
            image_seq_length=9,
        )  # fmt: skip
        kind: Any = Qwen3VLProcessor if name == "qwen3_vl" else InternVLProcessor
        own._calculate_timestamps = lambda *a: Qwen3VLProcessor._calculate_timestamps(None, *a)
        text = kind.replace_video_token(own, made, 0)
        assert found[1:-1] == model.tokenizer.encode_bare(text)


@pytest.mark.parametrize("name", ["qwen2_5_vl", *after_first(("qwen3_vl",), 0)])
def test_budgets_and_executors_change_no_bit(name: str, folder_of: Any) -> None:
    """Chunks of 16 tokens cut the video; in the small budget text streams from the disk."""
    _, folder = folder_of(name)
    found = []
    small = 1800 << 10
    request = asked([*words(4, 1), BEGIN, VIDEO, END, *words(5, 2)], [LISTED[:4]])
    for memory, chunk, executor in (
        (64 << 20, 16, "overlapped"), (small, 16, "overlapped"), (64 << 20, 16, "plain"),
        (64 << 20, 48, "overlapped"),
    ):  # fmt: skip
        options = OPTIONS | {"context": 256, "max_batch": 1, "executor": executor}
        with hmt.Engine(host_memory=memory, max_prefill_tokens=chunk, **options) as engine:
            model = engine.load_model(folder)
            found.append(logprobs_of(model.infer(request)))
            text = [h for b, h in model.plan.homes.items() if b.kind is not BlockKind.VISION]
            assert ("disk" in text) == (memory == small), model.plan.reserved
            assert model.summary().used_bytes["images"] == 0
    assert found[1] == found[0] and found[2] == found[0]
    assert found[3] == pytest.approx(found[0], abs=1e-5)  # sums of f32 weights, as of text


def test_equal_videos_share_a_prefix_and_a_pixel_makes_another(loaded: hmt.LoadedModel) -> None:
    prompt = [*words(30, 8), BEGIN, VIDEO, END, *words(20, 9)]
    other = [image.copy() for image in LISTED]
    other[2].putpixel((20, 10), tuple(255 - value for value in other[2].getpixel((20, 10))))

    def cached(video: Any) -> tuple[int, list[Any]]:
        stream = loaded.stream(asked(prompt, [video], prompt_logprobs=None))
        events = list(stream)
        return stream._sequence.cached_tokens, [event.logprob for event in events]

    first = cached(LISTED)
    again = cached([image.copy() for image in LISTED])
    changed, slower = cached(other), cached(hmt.Video(LISTED, fps=2))
    assert first[0] == 0 and first[1] == again[1]
    begin = tokens_of(loaded, asked(prompt, [LISTED])).index(VIDEO)  # behind the first time
    assert again[0] > begin + 16, "pages with tokens of the video are found"
    for one in (changed, slower):
        assert one[0] <= begin and one[1] != first[1]


def test_a_chat_has_video_parts_and_files_and_frames_are_the_same(
    loaded: hmt.LoadedModel, tmp_path: Path
) -> None:
    """Of a file of two frames a second all are sampled, as of a list all are taken."""
    loaded.tokenizer.use_chat_template(
        "{% for part in messages[0].content %}{{ '<|pad|>' if part.type == 'video' else "
        "'<|image|>' if part.type == 'image' else part.text }}{% endfor %}"
    )
    file = animation(LISTED, 500, "PNG")
    path = tmp_path / "moving.png"
    path.write_bytes(file)
    text = {"type": "text", "text": "What is this?"}
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "video"}, text]}]
    plain = [{"role": "user", "content": "What is this?"}]
    answers = [
        logprobs_of(loaded.infer(asked(chat, [video], IMAGES)))
        for chat in (parts, plain)
        for video in (hmt.Video(LISTED, fps=2), file, hmt.Video(path))
    ]
    assert all(answer == answers[0] for answer in answers)


def test_what_is_no_video_is_refused(loaded: hmt.LoadedModel, folder_of: Any) -> None:
    prompt, tall = [5, VIDEO, 8], [picture(1, 250)] * 2
    for video, said in (
        (b"", "cannot be decoded"),
        (FILE[:900], "cannot be decoded"),
        ("none.gif", "video none.gif cannot be read"),
        ([], "a list of images"),
        (3, "a list of images"),
        ([picture(8, 8), picture(9, 8)], "frame 1 of a video has 9 x 8 pixels"),
        (hmt.Video(LISTED, fps=0), "frames per second"),
        (tall, "more than 200 times"),
        ([LISTED[0]] * 1025, "1025 frames of it would be taken; the most is 1024"),
    ):
        with pytest.raises(RequestError, match=said):
            loaded.infer(asked(prompt, [video]))
    for wrong in ([5, 8], [VIDEO, 5, VIDEO]):
        with pytest.raises(RequestError, match="places for videos"):
            loaded.infer(asked(wrong, [LISTED]))
    with pytest.raises(RequestError, match="a request may have 8"):
        loaded.infer(asked([VIDEO] * 9, [FILE] * 9))
    with pytest.raises(RequestError, match="leave images and videos out"):
        loaded.beam_search(Request(input=prompt, videos=(FILE,), max_new_tokens=3), 2)
    assert loaded.summary().used_bytes["images"] == 0
