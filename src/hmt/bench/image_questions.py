"""Questions about images that come with a model, each with one right answer.

A model's folder holds them in `image_questions.json`: the images as PNG files in base64, and
(number of the image, kind, question, answer) each.  An answer is right where it is what the model
writes by greedy decoding, to the letter.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from hmt.base.errors import ConfigError
from hmt.bench.quality import Score
from hmt.contracts.request import Request

if TYPE_CHECKING:
    from hmt.engine import LoadedModel

FILE: Final = "image_questions.json"
MOST_TOKENS: Final = 16  # of an answer that is written


class ImageQuestion(NamedTuple):
    """`image` counts those of `ImageQuestions.images`."""

    image: int
    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class ImageQuestions:
    """Images as files, and what is asked about them."""

    images: tuple[bytes, ...]
    questions: tuple[ImageQuestion, ...]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Raises ConfigError where `file` holds none."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            images = tuple(base64.b64decode(image, validate=True) for image in data["images"])
            questions = tuple(ImageQuestion(*question) for question in data["questions"])
            if not all(0 <= question.image < len(images) for question in questions):
                raise ValueError("a question is about an image that is not there")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{file} does not hold questions about images ({error!r})") from error
        return cls(images, questions)

    def write(self, file: Path) -> None:
        """As `read` reads it."""
        images = [base64.b64encode(image).decode() for image in self.images]
        data = {"images": images, "questions": [list(question) for question in self.questions]}
        lines = json.dumps(data).replace('", "', '",\n"').replace("], [", "],\n[")
        file.write_text(lines + "\n", encoding="utf-8")

    def first(self, count: int | None) -> Self:
        """The first `count` questions, or all."""
        return replace(self, questions=self.questions[:count])

    def grade(
        self,
        answer: Callable[[bytes, str], str],
        progress: Callable[[str, Score], None] = lambda part, so_far: None,
    ) -> dict[str, Score]:
        """Right answers by kind, in the order of the questions.

        answer     what a model writes, asked about an image
        progress   called with "images" and the score of all kinds, after every question
        """
        scores: dict[str, Score] = {}
        for number, question in enumerate(self.questions, 1):
            right, total = scores.get(question.kind, Score(0, 0))
            given = answer(self.images[question.image], question.text)
            scores[question.kind] = Score(right + (given.strip() == question.answer), total + 1)
            progress("images", Score(sum(score.right for score in scores.values()), number))
        return scores


def answers_of(model: "LoadedModel") -> Callable[[bytes, str], str]:
    """What `model` writes, asked about an image, for `ImageQuestions.grade`.

    Raises RequestError at once for a model that does not see, and what the engine raises when it
    is called.
    """
    model.check_images(1)

    def answer(image: bytes, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        said = [{"role": "user", "content": content}]
        return model.infer(Request(said, MOST_TOKENS, images=(image,))).text

    return answer
