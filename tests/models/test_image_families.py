"""Images of further families: logits of transformers, budgets, chunks, prefixes."""

import json
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from default_part import after_first
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vision_families import (
    FAMILIES,
    MORE,
    family_logits,
    family_model,
    processor_of,
    publish_family,
)
from vision_models import BEGIN, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.base.errors import CheckpointError, RequestError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.request import Request
from hmt.engine.scheduling.prefill_budget import keep_blocks
from hmt.kernels import ops
from hmt.models.vision.observing import check_replaces

IMAGES = [picture(37, 21), picture(18, 50, 1)]
# Of MORE, embeddings of layers take another path.  The others repeat those of FAMILIES.
FURTHER = after_first(sorted(MORE, key=lambda name: name != "gemma4-layers"))
SMALL = [picture(14, 9), picture(7, 22, 1)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 1024, "max_batch": 2}


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 4000) for _ in range(count)]


def mark(name: str) -> int:
    return BEGIN if name.startswith("gemma3") else IMAGE


def prompt(name: str) -> list[int]:
    return [*words(7, 1), mark(name), *words(5, 2), mark(name), *words(6, 3)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        case = (FAMILIES | MORE)[name]
        model = family_model(case)
        publish_family(case, model, folder)
        return model, folder

    return made


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[tuple[str, Any]]:
    _, folder = folder_of(request.param)
    chunk = 80 if request.param == "gemma4" else 16  # its images have up to 70 tokens
    options = OPTIONS | {"max_prefill_tokens": chunk, "prefix_cache": True}
    with hmt.Engine(host_memory="64MiB", **options) as engine:
        yield request.param, engine.load_model(folder)


def asked(prompt: list[int], images: Any = tuple(IMAGES), **more: Any) -> Request:
    return scored_request(prompt, images, **{"max_new_tokens": 4} | more)


def check_logits(name: str, model: hmt.LoadedModel, folder_of: Any) -> None:
    """Text before, between and behind two images; chunks of 16 tokens."""
    reference, folder = folder_of(name)
    request = asked(prompt(name))
    answer = model.infer(request)
    whole = model._input.process(request, None).state.tokens
    assert len(whole) == answer.prompt_tokens > 2 * 4 + 18
    tokens = [*whole, *answer.token_ids]
    wanted = family_logits(reference, folder, tokens, IMAGES).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(logprobs_of(answer)), expected, atol=1e-4, rtol=0)


def test_logits_are_those_of_transformers(loaded: tuple[str, Any], folder_of: Any) -> None:
    check_logits(*loaded, folder_of)


@pytest.mark.parametrize("name", FURTHER)
def test_logits_of_further_sizes(name: str, folder_of: Any) -> None:
    _, folder = folder_of(name)
    chunk = 80 if name == "gemma4-shared" else 16
    with hmt.Engine(host_memory="64MiB", **OPTIONS, max_prefill_tokens=chunk) as engine:
        check_logits(name, engine.load_model(folder), folder_of)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_budgets_change_no_bit_and_chunks_nothing(name: str, folder_of: Any) -> None:
    _, folder = folder_of(name)
    found = []
    for memory, chunk, executor in (
        (64 << 20, 16, "overlapped"), (1150 << 10, 16, "plain"), (64 << 20, 48, "overlapped"),
    ):  # fmt: skip
        options = OPTIONS | {"context": 256, "max_batch": 1, "executor": executor}
        with hmt.Engine(host_memory=memory, max_prefill_tokens=chunk, **options) as engine:
            model = engine.load_model(folder)
            found.append(logprobs_of(model.infer(asked(prompt(name), SMALL))))
            streams = any(
                home == "disk" and block.kind is not BlockKind.VISION
                for block, home in model.plan.homes.items()
            )
            assert streams == (memory < 2 << 20), model.plan.reserved
    assert found[1] == found[0]
    assert found[2] == pytest.approx(found[0], abs=1e-5)  # sums of f32 weights, as of text


def test_equal_images_share_a_prefix_and_a_pixel_makes_another(loaded: tuple[str, Any]) -> None:
    name, model = loaded
    tokens = [*words(30, 8), mark(name), *words(20, 9)]
    other = IMAGES[0].copy()
    other.putpixel((20, 10), tuple(255 - value for value in other.getpixel((20, 10))))

    def cached(image: Any) -> tuple[int, list[float]]:
        stream = model.stream(asked(tokens, (image,), prompt_logprobs=None))
        events = list(stream)
        return stream._sequence.cached_tokens, [event.logprob for event in events]

    first, again, changed = cached(IMAGES[0]), cached(IMAGES[0]), cached(other)
    assert first[0] == 0 and again[1] == pytest.approx(first[1], abs=1e-5)
    assert again[0] > 33, "pages with image tokens are found"
    assert changed[0] <= 32 and changed[1] != first[1]


def test_requests_run_together(loaded: tuple[str, Any]) -> None:
    name, model = loaded
    requests = [
        asked(prompt(name)), asked(words(25, 5), ()),
        asked([*words(3, 6), mark(name), *words(9, 7)], IMAGES[1:]),
    ]  # fmt: skip
    alone = [logprobs_of(model.infer(request)) for request in requests]
    for answer, expected in zip(model.infer_batch(requests), alone, strict=True):
        assert logprobs_of(answer) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("mistral3", "pixtral")])
def test_text_is_written_as_transformers_does(name: str, folder_of: Any) -> None:
    """Also where text beside an image meets text that is written with it."""
    reference, folder = folder_of(name)
    processor = processor_of(reference, folder)
    text = f"What is\n{processor.image_token}\nand {processor.image_token} there?"
    images: Any = IMAGES if name != "idefics3" else [IMAGES]
    wanted = processor(text=[text], images=images, padding=False)["input_ids"][0]
    with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
        model = engine.load_model(folder)
        found = model._input.process(asked(text), None)  # type: ignore[arg-type]
    assert [t for t in found.state.tokens if t] == [t for t in list(wanted) if t]


def test_files_of_a_processor_are_read_within_limits(
    folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by AutoTokenizer; a child process encodes with parts that may take any time."""
    _, folder = folder_of("llava_next")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    part = {"type": "Replace", "pattern": {"Regex": "(?:(x+x+)+y){2}"}, "content": "z"}
    tokenizer["normalizer"] = part
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    processor = json.loads((folder / "processor_config.json").read_text())
    sound = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "x/y"}
    said = processor | {"audio_tokenizer": sound}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))

    def refused(*args: Any, **more: Any) -> None:
        raise AssertionError("transformers reads the tokenizer")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refused)
    found = []
    for where in (folder, tmp_path):
        with hmt.Engine(host_memory="64MiB", **OPTIONS) as engine:
            found.append(logprobs_of(engine.load_model(where).infer(asked(prompt("llava_next")))))
    assert found[1] == found[0]


def test_an_image_that_no_step_holds_is_refused(folder_of: Any) -> None:
    _, folder = folder_of("gemma3")
    with hmt.Engine(host_memory="64MiB", **OPTIONS, max_prefill_tokens=8) as engine:
        model = engine.load_model(folder)
        with pytest.raises(RequestError, match="--max-prefill-tokens 9"):
            model.infer(asked(prompt("gemma3")))
        assert model.infer(asked(words(30, 1), ())).token_ids


def test_types_whose_features_do_more_are_refused() -> None:
    for kind in ("paligemma", "qwen3_vl", "mllama"):
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(CONFIG_MAPPING[kind]())
        with pytest.raises(CheckpointError):
            check_replaces(model, model.model.get_decoder(), IMAGE)


def test_chunks_keep_blocks() -> None:
    """They end in front of a block that they would cut, and the first prompt gets all of its."""
    assert keep_blocks([(0, [(20, 40)])], [24], 24) == [16]
    assert keep_blocks([(16, [(20, 40)])], [24], 24) == [24]
    assert keep_blocks([(16, [(20, 40)])], [16], 24) == [4]
    assert keep_blocks([(20, [(20, 40)])], [12], 24) == [20]
    assert keep_blocks([(30, [(20, 40)])], [2], 24) == [10]
    assert keep_blocks([(20, [(20, 40)]), (0, [])], [12, 12], 24) == [20, 0]
    assert keep_blocks([(0, []), (20, [(20, 40)])], [12, 12], 24) == [12, 0]


def test_rows_of_a_block_see_each_other() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    for window in (0, 3):
        at, positions = torch.arange(4, 9)[:, None], torch.arange(9)
        seen = positions > at - window if window else torch.ones(5, 9, dtype=torch.bool)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).double(),
            key.repeat_interleave(2, 1).transpose(0, 1).double(),
            value.repeat_interleave(2, 1).transpose(0, 1).double(),
            attn_mask=seen, scale=0.3,
        )  # fmt: skip
        found = ops.block_attention(query, key, value, start=4, scale=0.3, window=window)
        torch.testing.assert_close(found.double(), wanted.transpose(0, 1), atol=1e-5, rtol=0)
