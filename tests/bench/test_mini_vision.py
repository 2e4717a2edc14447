"""The published model that sees: answers in HMT and in transformers, and how it was trained."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from score_images import TransformersModel
from tokenizers import Tokenizer
from train_vision import IMAGE_AT, BatchedModel, build, special_tokens
from transformers import AutoImageProcessor

import hmt
from hmt.bench import Quality
from hmt.bench.image_questions import FILE, ImageQuestions, answers_of

FOLDER = Path(__file__).parents[2] / "assets" / "mini-vision"
ASKED = ImageQuestions.read(FOLDER / FILE)
# Of which the last is answered wrongly: it reads "duck".
FEW = ImageQuestions(ASKED.images, (*ASKED.questions[:13], ASKED.questions[175]))
# The schemes, and those of transformers' numbers: with rounded activations the codes are the same.
SCHEMES = {
    "none": ("none",),
    "w8a16": ("w8a16", "w8a8"),
    "w8a16:64": ("w8a8:64",),
    "w4a16": ("w4a16", "w4a8"),
    "w4a16:64": ("w4a8:64",),
    "w4a16:128": ("w4a8:128",),
    "nvfp4a16": ("nvfp4a16", "nvfp4a8"),
    "mxfp4a16": ("mxfp4a16", "mxfp4a8"),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "published": ("none", {}),
    "exact": ("none", {"activations": "exact"}),
    "float32": ("none", {"activations": "exact", "dtype": "float32"}),
    **{
        ours: (theirs, {"quantization": ours})
        for theirs, all_of in SCHEMES.items()
        for ours in all_of
    },
}
DEFAULT = ("published", "w4a8")


def answers(answer: Callable[[bytes, str], str], questions: ImageQuestions) -> list[str]:
    return [
        answer(questions.images[question.image], question.text).strip()
        for question in questions.questions
    ]


@cache
def reference(quant: str) -> TransformersModel:
    return TransformersModel(FOLDER, dtype=torch.float32, quant=quant)


@cache
def theirs(quant: str, questions: ImageQuestions) -> list[str]:
    return answers(reference(quant).answer, questions)


@pytest.mark.parametrize(
    ("way", "questions"),
    [
        *(pytest.param(way, FEW, id=f"{way}-few") for way in DEFAULT),
        *(
            pytest.param(way, ASKED, id=f"{way}-all", marks=pytest.mark.whole)
            for way in WAYS
        ),
    ],
)  # fmt: skip
def test_answers_are_those_of_transformers(way: str, questions: ImageQuestions) -> None:
    quant, options = WAYS[way]
    with hmt.Engine(host_memory="512MiB", context=1024, **options) as engine:
        ours = answers(answers_of(engine.load_model(FOLDER)), questions)
    assert ours == theirs(quant, questions)
    right = [
        said == question.answer for said, question in zip(ours, questions.questions, strict=True)
    ]
    assert sum(right) == len(right) - 1


def test_probabilities_are_those_of_transformers() -> None:
    """Of the first token of answers, which are sure, and of what else it could have been."""
    options: dict[str, Any] = {"activations": "exact", "dtype": "float32", "context": 1024}
    with hmt.Engine(host_memory="512MiB", **options) as engine:
        model = engine.load_model(FOLDER)
        for image, _, text, _ in FEW.questions[::3]:
            said = [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
            ]
            shown = (FEW.images[image],)
            request = hmt.Request(said, 1, sampling=hmt.Sampling(logprobs=8), images=shown)
            [ours] = model.infer(request).logprobs
            with torch.no_grad():
                logits = (
                    reference("none")
                    .model(**reference("none").inputs(shown[0], text))
                    .logits[0, -1]
                )
            expected = logits.log_softmax(-1)
            assert len(ours.top) == 8
            for token, logprob in (*ours.top, (ours.token_id, ours.logprob)):
                assert logprob == pytest.approx(expected[token].item(), abs=1e-3)


def test_published_scores_are_of_all_questions() -> None:
    published = Quality.read(FOLDER / "quality.json")
    kinds = [question.kind for question in ASKED.questions]
    assert {kind: score.total for kind, score in published.images.items()} == {
        kind: kinds.count(kind) for kind in kinds
    }


def test_the_training_computes_what_transformers_does() -> None:
    """Of images of one size at once: the same states of every token."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    special = special_tokens(tokenizer)
    torch.manual_seed(3)
    model = build(tokenizer.get_vocab_size(), special).eval()
    pixels = torch.randint(0, 256, (2, 96, 64, 3), dtype=torch.uint8)
    tokens, text = 24, [special.vision_end, 40, 41, 42, special.end]
    ids = torch.tensor([[special.begin, special.user, special.vision_start]] * 2)
    ids = torch.cat([ids, torch.full((2, tokens), special.image), torch.tensor([text] * 2)], 1)
    processor = AutoImageProcessor.from_pretrained(FOLDER, backend="pil")
    images = [Image.fromarray(image.numpy()) for image in pixels]
    given = processor(images=images, return_tensors="pt")
    with torch.no_grad():
        ours = BatchedModel(model).states(pixels, ids)
        expected = model.model(
            input_ids=ids, mm_token_type_ids=(ids == special.image).int(), **given
        ).last_hidden_state
    assert IMAGE_AT == 3
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
