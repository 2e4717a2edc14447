"""What the reference models are trained on: book text, short tasks, retrieval; with weights."""

import numpy as np
import numpy.typing as npt

from hmt.bench import BEGIN, Corpus, Encode, Tokens, short_task

Weights = npt.NDArray[np.float32]

# Answers count more than what leads to them: they are few, and they are what is wanted.
_TASK_PROMPT, _TASK_ANSWER = 0.3, 3.0
_TEXT, _QUESTION, _ANSWER = 0.5, 0.3, 6.0
_LONGEST_WITHOUT_RETRIEVAL = 4096


class Mixture:
    """Training sequences from one seed.  Every draw advances the random sequence."""

    def __init__(
        self, encode: Encode, text: Tokens, seed: int, pool_size: int, text_share: float = 0.4
    ) -> None:
        """`text` is the tokenised books [tokens]; `pool_size` short tasks are made at once.

        text_share   of sequences up to 4096 tokens, those that are book text; at most 0.6
        """
        self._corpus = Corpus(encode, text, seed)
        self._text_share = text_share
        self._pool = [self._task() for _ in range(pool_size)]

    def sample(self, length: int) -> tuple[Tokens, Weights]:
        """A sequence and the loss weight of each of its tokens: both [length].

        Up to 4096 tokens: 60% book text or short tasks one after the other, 40% retrieval; longer
        sequences are all retrieval.
        """
        draw = self._corpus.rng.random()
        if length <= _LONGEST_WITHOUT_RETRIEVAL:
            if draw < self._text_share:
                return self._corpus.passage(length), np.ones(length, np.float32)
            if draw < 0.6:
                return self._tasks(length)
        return self._retrieval(length)

    def _task(self) -> tuple[Tokens, Weights]:
        prompt, answer = short_task(self._corpus.rng)
        before, after = self._corpus.encode(BEGIN + prompt), self._corpus.encode(answer)
        weights = [_TASK_PROMPT] * len(before) + [_TASK_ANSWER] * len(after)
        ids = np.array(before + after, self._corpus.text.dtype)
        return ids, np.array(weights, np.float32)

    def _tasks(self, length: int) -> tuple[Tokens, Weights]:
        chosen: list[tuple[Tokens, Weights]] = []
        filled = 0
        while filled < length:
            chosen.append(self._corpus.rng.choice(self._pool))
            filled += len(chosen[-1][0])
        ids, weights = zip(*chosen, strict=True)
        return np.concatenate(ids)[:length], np.concatenate(weights)[:length]

    def _retrieval(self, length: int) -> tuple[Tokens, Weights]:
        drawn = self._corpus.retrieval(length)
        weights = np.full(length, _TEXT, np.float32)
        weights[drawn.first_question :] = _QUESTION
        for at, answer in drawn.answers:
            weights[at : at + len(answer)] = _ANSWER
        return drawn.ids, weights
