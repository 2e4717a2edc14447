"""Images through the engine: logits of transformers, memory, chunks, and what is refused."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import (
    BEGIN,
    CASES,
    END,
    IMAGE,
    file_of,
    logprobs_of,
    picture,
    publish,
    reference_logits,
    scored_request,
    vision_model,
)

import hmt
from hmt.base.errors import BudgetError, DiskReadError, HMTError, RequestError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Completion, Request
from hmt.contracts.store import Presence
from hmt.models.vision import opening

IMAGES = [picture(37, 21), picture(18, 50, 1)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 512, "max_batch": 4}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "glm4v")


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(count)]


PROMPT = [*words(7, 1), BEGIN, IMAGE, END, *words(5, 2), BEGIN, IMAGE, END, *words(6, 3)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        model = vision_model(name)
        publish(model, folder)
        return model, folder

    return made


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[hmt.LoadedModel]:
    _, folder = folder_of(request.param)
    options = OPTIONS | {"max_prefill_tokens": 16, "prefix_cache": True}
    with hmt.Engine(host_memory="64MiB", **options) as engine:
        yield engine.load_model(folder)


def asked(prompt: Any = PROMPT, images: Any = tuple(IMAGES), **more: Any) -> Request:
    return scored_request(prompt, images, **more)


def tower_bytes(model: hmt.LoadedModel) -> int:
    """Bytes of the tower in memory."""
    store = model._core.memory.weights
    blocks = [b for b in model.plan.homes if b.kind is BlockKind.VISION]
    assert blocks
    return sum(
        store.slot_bytes(block) for block in blocks if store.presence(block) is not Presence.MISS
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, folder_of: Any) -> None:
    """Text before, between and behind two images; chunks of 16 tokens cut these."""
    model, folder = folder_of(name)
    with hmt.Engine(host_memory="64MiB", **OPTIONS, max_prefill_tokens=16) as engine:
        loaded = engine.load_model(folder)
        answer = loaded.infer(asked())
        tokens = [*prompt_of(loaded), *answer.token_ids]
    wanted = reference_logits(model, folder, tokens, IMAGES).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    assert answer.prompt_tokens > 40
    torch.testing.assert_close(torch.tensor(logprobs_of(answer)), expected, atol=1e-4, rtol=0)


def test_glm46v_is_glm4v_moe_by_another_name(folder_of: Any, tmp_path: Path) -> None:
    reference, folder = folder_of("glm4v_moe")
    publish(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "glm46v", "architectures": ["Glm46VForConditionalGeneration"]}
    config["text_config"]["model_type"] = "glm4v_moe_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = []
    for path in (folder, tmp_path):
        with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
            answers.append(logprobs_of(engine.load_model(path).infer(asked())))
    assert answers[0] == answers[1]


def prompt_of(model: hmt.LoadedModel) -> list[int]:
    """PROMPT with as many tokens as its images have."""
    tokens = iter(PROMPT)
    whole: list[int] = []
    counts = [model._input.process(asked([IMAGE], (i,)), None).state.prompt_tokens for i in IMAGES]
    for token in tokens:
        whole += [token] * (counts.pop(0) if token == IMAGE else 1)
    return whole


@pytest.mark.parametrize("name", (*FAMILIES, "exaone4_5"))
def test_budgets_change_no_bit_and_chunks_nothing(name: str, folder_of: Any) -> None:
    _, folder = folder_of(name)
    found = []
    small = (1750 if name == "exaone4_5" else 1600) << 10
    for memory, chunk, executor in (
        (64 << 20, 16, "overlapped"), (small, 16, "overlapped"), (64 << 20, 16, "plain"),
        (64 << 20, 48, "overlapped"),
    ):  # fmt: skip
        options = OPTIONS | {"context": 256, "max_batch": 1, "executor": executor}
        with hmt.Engine(host_memory=memory, max_prefill_tokens=chunk, **options) as engine:
            model = engine.load_model(folder)
            found.append(logprobs_of(model.infer(asked())))
            streams = any(
                home == "disk" and block.kind is not BlockKind.VISION
                for block, home in model.plan.homes.items()
            )
            assert streams == (memory < 2 << 20), model.plan.reserved
    assert found[1] == found[0] and found[2] == found[0]
    assert found[3] == pytest.approx(found[0], abs=1e-5)  # sums of f32 weights, as of text


def test_the_tower_comes_with_an_image_and_text_reads_none_of_it(folder_of: Any) -> None:
    _, folder = folder_of("qwen3_vl")
    with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
        model = engine.load_model(folder)
        store = model._core.memory.weights
        read = store.disk_counters().read_bytes
        model.infer(asked(words(20, 4), ()))
        assert tower_bytes(model) == 0 and store.disk_counters().read_bytes == read
        assert model.summary().used_bytes["images"] == 0
        assert model._core.memory.images._decoder._sandbox._process is None
        model.infer(asked())
        assert tower_bytes(model) > 0 and store.disk_counters().read_bytes > read
        assert model.summary().used_bytes["images"] == 0, "its images have gone with the request"


def test_equal_images_share_a_prefix_and_a_pixel_makes_another(loaded: hmt.LoadedModel) -> None:
    prompt = [*words(30, 8), BEGIN, IMAGE, END, *words(20, 9)]
    other = IMAGES[0].copy()
    other.putpixel((20, 10), tuple(255 - value for value in other.getpixel((20, 10))))

    def cached(image: Any) -> tuple[int, Completion]:
        stream = loaded.stream(asked(prompt, (image,), prompt_logprobs=None))
        events = list(stream)
        return stream._sequence.cached_tokens, [event.logprob for event in events]

    first = cached(IMAGES[0])
    again = cached(file_of(IMAGES[0]))
    changed = cached(other)
    assert first[0] == 0 and first[1] == again[1]
    begin = prompt.index(IMAGE)
    assert again[0] > begin + 16, "pages with image tokens are found"
    assert changed[0] <= begin and changed[1] != first[1]


def test_requests_with_and_without_images_run_together(loaded: hmt.LoadedModel) -> None:
    requests = [
        asked(), asked(words(25, 5), ()), asked([*words(3, 6), IMAGE, *words(9, 7)], IMAGES[1:])
    ]  # fmt: skip
    alone = [logprobs_of(loaded.infer(request)) for request in requests]
    for answer, expected in zip(loaded.infer_batch(requests), alone, strict=True):
        assert logprobs_of(answer) == pytest.approx(expected, abs=1e-5)


def test_several_answers_share_what_is_made_of_an_image(
    loaded: hmt.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, decoded = loaded._core.memory.images._decoder, list[bytes]()
    pixels = decoder.pixels
    monkeypatch.setattr(decoder, "pixels", lambda data: decoded.append(data) or pixels(data))
    prompt, image = [*words(3, 5), IMAGE, *words(2, 6)], file_of(IMAGES[1])
    plain = {"prompt_logprobs": None}
    answers = loaded.infer_choices(asked(prompt, (image,), **plain), 3)
    assert len(decoded) == 1
    one = loaded.infer(asked(prompt, (image,), **plain))
    assert [answer.token_ids for answer in answers] == [one.token_ids] * 3


def test_a_path_bytes_and_pillow_are_the_same_image(
    loaded: hmt.LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "picture.webp"
    IMAGES[0].save(path, lossless=True)
    given = path, str(path), path.read_bytes(), IMAGES[0], file_of(IMAGES[0])
    prompt = [*words(3, 1), IMAGE, *words(3, 2)]
    answers = [logprobs_of(loaded.infer(asked(prompt, (image,)))) for image in given]
    assert all(answer == answers[0] for answer in answers)


def test_a_chat_has_image_parts(loaded: hmt.LoadedModel) -> None:
    text = {"type": "text", "text": "What is this?"}
    parts = [{"role": "user", "content": [{"type": "image"}, text]}]
    plain = [{"role": "user", "content": "What is this?"}]
    answers = [loaded.infer(asked(chat, IMAGES[:1])) for chat in (parts, plain)]
    assert logprobs_of(answers[0]) == logprobs_of(answers[1])
    without = loaded.infer(asked(plain, ()))
    assert answers[0].prompt_tokens > without.prompt_tokens + 10


def test_what_is_no_image_is_refused(loaded: hmt.LoadedModel, tmp_path: Path) -> None:
    data = file_of(IMAGES[0])
    for image, said in (
        (b"", "cannot be decoded"),
        (data[:60], "cannot be decoded"),
        (b"<svg/>", "cannot be decoded"),
        (tmp_path / "none.png", "cannot be read"),
        (3, "give a path"),
    ):
        with pytest.raises(RequestError, match=said):
            loaded.infer(asked([5, IMAGE, 7], (image,)))
    for prompt in ([5, 7], [IMAGE, 5, IMAGE]):
        with pytest.raises(RequestError, match="places for images"):
            loaded.infer(asked(prompt, IMAGES[:1]))
    with pytest.raises(RequestError, match="64"):
        loaded.infer(asked([IMAGE] * 65, (data,) * 65))
    with pytest.raises(RequestError, match="text only"):
        loaded.beam_search(Request(input=[5, IMAGE], images=(data,), max_new_tokens=3), 2)
    assert loaded.summary().used_bytes["images"] == 0


def test_images_wait_for_memory_or_are_refused(folder_of: Any) -> None:
    _, folder = folder_of("qwen2_5_vl")
    options = OPTIONS | {"max_batch": 1, "context": 128, "max_prefill_tokens": 16}
    with hmt.Engine(host_memory="6MiB", **options) as engine:
        model = engine.load_model(folder)
        prompt = [5, IMAGE, 7]
        with pytest.raises(RequestError, match="raise --host-memory"):
            model.infer(asked(prompt, (picture(1200, 900),)))
        limit = model.plan.reserved["images"]
        side = int((limit / 9 * 0.7) ** 0.5)
        images = model._core.memory.images
        with (
            images._room(limit // 2, "another", ()),
            pytest.raises(BudgetError, match="try again later"),
        ):
            model.infer(asked(prompt, (picture(side, side),)))
        model.infer(asked(prompt, (picture(side, side),)))
        assert model.summary().used_bytes["images"] == 0


def test_a_model_without_its_processor_reads_text_only(folder_of: Any, tmp_path: Path) -> None:
    publish(folder_of("llava")[0], tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
        model = engine.load_model(tmp_path)
        with pytest.raises(RequestError, match="no preprocessor_config"):
            model.infer(asked())
        model.infer(asked(words(5, 1), ()))


def test_a_device_and_choices_give_the_same(folder_of: Any) -> None:
    _, folder = folder_of("qwen3_vl")
    found = []
    for options in ({}, {"gpus": "fake", "gpu_memory": "64MiB"}):
        given: dict[str, Any] = OPTIONS | {"context": 128, "max_prefill_tokens": 16} | options
        with hmt.Engine(host_memory="64MiB", **given) as engine:
            model = engine.load_model(folder)
            assert bool(model.plan.device.stages) == bool(options)
            found.append(logprobs_of(model.infer(asked())))
            each = model.infer_choices(asked(prompt_logprobs=None), 2)
            assert each[0].token_ids == each[1].token_ids
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def ends(streams: list[Any]) -> list[list[float] | HMTError]:
    """Of each stream its log-probabilities, or what it failed with."""
    found: list[list[float] | HMTError] = []
    for stream in streams:
        try:
            found.append([event.logprob for event in stream])
        except HMTError as error:
            found.append(error)
    return found


class Broken:
    """Weights of which the second block that is leased cannot be."""

    def __init__(self, weights: Any, fault: Exception) -> None:
        self._weights, self._fault, self._leases = weights, fault, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def lease(self, block: Any) -> Any:
        self._leases += 1
        if self._leases > 1:
            raise self._fault
        return self._weights.lease(block)


@pytest.mark.parametrize("fault", [DiskReadError("the tower cannot be read"), ValueError("code")])
def test_an_image_that_cannot_be_encoded_fails_its_own_requests_alone(
    loaded: hmt.LoadedModel, fault: Exception
) -> None:
    """The others of its step go on, and later the same image is encoded."""
    core, encode = loaded._core, loaded.prepared.model.encoder.encode
    images = [picture(8, 8, seed) for seed in (91, 92)]
    plain = {"prompt_logprobs": None, "cache_salt": repr(fault)}
    requests = [
        asked(words(4, 31), (), **plain),
        *(asked([*words(2, seed), IMAGE], (image,), **plain) for seed, image in enumerate(images)),
    ]
    bad = core.memory.images.hold(images[:1])[0][0].key
    steps: list[list[int]] = []
    prepared = core.runner.encode_images

    def noted(output: Any) -> Any:
        steps.append([segment.request for segment in output.segments])
        return prepared(output)

    def failing(image: Any, weights: Any) -> Any:
        return encode(image, Broken(weights, fault) if image.key == bad else weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.prepared.model.encoder), "encode", lambda _, *a: failing(*a))
        patch.setattr(core.runner, "encode_images", noted)
        text, failed, seen = ends(loaded.stream_batch(requests))
        assert max(map(len, steps)) > 1, "it failed beside others"
        alone = ends(loaded.stream_batch(requests[1:2]))
    assert isinstance(failed, HMTError) and isinstance(alone[0], HMTError)
    assert str(fault) in str(failed)
    after = ends(loaded.stream_batch(requests))
    assert text == pytest.approx(after[0], abs=1e-5) and seen == pytest.approx(after[2], abs=1e-5)
    assert not isinstance(after[1], HMTError)
    assert loaded.summary().used_bytes["images"] == 0
    load = loaded._loop.call(lambda: core.scheduler.load)
    assert (load.running, load.waiting) == (0, 0)


def test_without_pillow_it_says_what_to_install(folder_of: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
        model = engine.load_model(folder_of("llava")[1])
        assert model.infer(Request(words(5, 1), 2, ignore_eos=True)).token_ids
        with pytest.raises(RequestError, match=r"pip install 'hmt\[images\]'"):
            model.infer(Request([*words(2, 1), IMAGE], 2, images=(IMAGES[0],)))
