"""What models answer to one request at a time: the oracle of tests of many requests at once."""

import hmt
from hmt.engine import LoadedModel


class SingleAnswers:
    """Answers of a model that has nothing else to do, each computed once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._answers: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: hmt.Request) -> tuple[int, ...]:
        key = repr(request)
        if key not in self._answers:
            self._answers[key] = self._model.infer(request).token_ids
        return self._answers[key]
