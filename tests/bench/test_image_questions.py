"""Questions about images: their file, and how answers are counted."""

import base64
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from drawn_images import COLOURS, KINDS, MOST, draw
from PIL import Image
from score_images import held_out

from hmt.base.errors import ConfigError
from hmt.bench import Quality, Score
from hmt.bench.image_questions import FILE, ImageQuestion, ImageQuestions

PUBLISHED = Path(__file__).parents[2] / "assets" / "mini-vision" / FILE
ASKED = ImageQuestions(
    (b"first", b"second"),
    (
        ImageQuestion(0, "colour", "Which?", "red"),
        ImageQuestion(1, "colour", "Which?", "blue"),
        ImageQuestion(1, "number", "How many?", "2"),
    ),
)


def test_right_answers_are_counted_by_kind() -> None:
    shown: list[tuple[str, Score]] = []
    answers = {(b"first", "Which?"): " red\n", (b"second", "Which?"): "dark blue"}
    scores = ASKED.grade(
        lambda image, text: answers.get((image, text), "2"), lambda *so_far: shown.append(so_far)
    )
    assert scores == {"colour": Score(1, 2), "number": Score(1, 1)}
    assert shown == [("images", Score(*each)) for each in ((1, 1), (1, 2), (2, 3))]
    first = ASKED.first(1).grade(lambda image, text: "red")
    assert first == {"colour": Score(1, 1)} and ASKED.first(None) == ASKED


def test_questions_and_scores_survive_their_files(tmp_path: Path) -> None:
    ASKED.write(tmp_path / FILE)
    assert ImageQuestions.read(tmp_path / FILE) == ASKED
    quality = Quality(Score(3, 4), images={"colour": Score(1, 2), "number": Score(1, 1)})
    (tmp_path / "quality.json").write_text(json.dumps(quality.as_json()))
    assert Quality.read(tmp_path / "quality.json") == quality


IMAGE = base64.b64encode(b"data").decode()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"images": ["?"], "questions": []}',
        json.dumps({"images": [IMAGE], "questions": [[1, "colour", "Which?", "red"]]}),
        json.dumps({"images": [IMAGE], "questions": [[0, "colour"]]}),
    ],
)
def test_a_file_without_questions_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match="image_questions"):
        ImageQuestions.read(tmp_path / FILE)


def test_the_published_questions_are_those_that_the_training_code_draws() -> None:
    drawn, published = held_out(210), ImageQuestions.read(PUBLISHED)
    assert drawn.questions == published.questions
    assert {q.kind for q in drawn.questions} == set(KINDS)
    for ours, theirs in zip(drawn.images, published.images, strict=True):
        with Image.open(io.BytesIO(ours)) as one, Image.open(io.BytesIO(theirs)) as other:
            assert one.size == other.size and max(one.size) <= MOST


def test_images_show_what_their_questions_say() -> None:
    """Shapes have their number of regions' colours, where the answers say that they are."""
    rng = random.Random(5)
    seen = 0
    for _ in range(60):
        image, asked = draw(rng, 120, 90)
        [described] = [question.answer for question in asked if question.kind == "describe"]
        if described.startswith("the "):
            continue
        pixels = np.asarray(image).astype(int)
        for part in described.split(", "):
            colour, _, place = part.split(" ", 2)
            row = 0 if "top" in place else 2 if "bottom" in place else 1
            column = 0 if "left" in place else 2 if "right" in place else 1
            cell = pixels[row * 30 : row * 30 + 30, column * 40 : column * 40 + 40]
            near = np.abs(cell - np.array(COLOURS[colour])).max(-1) <= 13
            assert near.sum() >= 50, (described, part)
            seen += 1
    assert seen > 60
