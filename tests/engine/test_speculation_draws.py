"""Draft tokens leave the distribution of drawn tokens what the model says: by chi-square.

The model is one layer that adds nothing, so that the next token's distribution follows from the
last token alone: it is known in float64, and each of 20,000 tokens is a draw from one of a few.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from draft_oracle import Oracle, always_guess

import hmt
from hmt.engine import LoadedModel
from hmt.engine.speculation.draft import Draft, Worth
from hmt.engine.speculation.prompt_lookup import PromptLookup
from hmt.kernels.cpu import extension
from hmt.profiling.random_model import Shape, write_random_model

VOCAB, DRAWS, SEQUENCES = 24, 20_000, 8
TEMPERATURE, TOP_P = 0.8, 0.9
_LEAST_EXPECTED = 5  # of a cell: those below count as one


class Chain(Oracle):
    """For every second request a lookup; for the others the likeliest tokens in turn, or any."""

    def __init__(self, chances: torch.Tensor) -> None:
        super().__init__([], seed=1)
        self._likeliest = chances.argmax(1).tolist()
        self._lookup = PromptLookup()
        self.lookups = 0  # tokens that were looked up

    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        """Up to `most` of them."""
        if number % 2:
            draft = self._lookup.propose(number, scope, tokens, most, worth)
            self.lookups += len(draft.tokens)
            return draft
        drafts = [tokens[-1]]
        for _ in range(self._random.randint(0, most)):
            other = self._random.random() < 0.3
            drafts.append(self._random.randrange(VOCAB) if other else self._likeliest[drafts[-1]])
        return Draft(tuple(drafts[1:]), ("chain",) * (len(drafts) - 1))


def expected(model: LoadedModel) -> torch.Tensor:
    """The chance of each token behind each: float64 [VOCAB, VOCAB]."""
    rows = [model.logits([token], [0], prefill=1)[0].double() for token in range(VOCAB)]
    chances = torch.softmax(torch.stack(rows) / TEMPERATURE, 1)
    ranked, order = chances.sort(descending=True)
    # Tokens count until those before them have the share that is asked for.
    ranked[ranked.cumsum(1) - ranked >= TOP_P] = 0
    return torch.zeros_like(chances).scatter_(1, order, ranked / ranked.sum(1, keepdim=True))


def deviation(seen: Counter[tuple[int, int]], chances: torch.Tensor) -> float:
    """Standard deviations by which chi-square is above its mean.

    E. B. Wilson and M. M. Hilferty, "The Distribution of Chi-Square" (1931).
    """
    total, degrees = 0.0, 0
    for token in range(VOCAB):
        counts = torch.tensor([seen[token, after] for after in range(VOCAB)]).double()
        wanted = chances[token] * counts.sum()
        assert not counts[chances[token] == 0].any(), "a token that top_p leaves out"
        few = wanted < _LEAST_EXPECTED
        cells = torch.cat((wanted[~few], wanted[few].sum()[None]))
        found = torch.cat((counts[~few], counts[few].sum()[None]))
        there = cells >= _LEAST_EXPECTED
        total += float(((found - cells)[there] ** 2 / cells[there]).sum())
        degrees += max(0, int(there.sum()) - 1)
    share = 2 / (9 * degrees)
    return ((total / degrees) ** (1 / 3) - (1 - share)) / share**0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    def edit(name: str, matrix: torch.Tensor) -> None:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix.zero_()
        elif name == "lm_head.weight":
            matrix *= 16

    folder: Path = tmp_path_factory.mktemp("model")
    write_random_model(folder, Shape(1, 64, 64, 2, 1, vocab_size=VOCAB), edit=edit)
    with hmt.Engine(host_memory="256MiB", context=4096, max_batch=SEQUENCES) as engine:
        yield engine.load_model(folder)


@pytest.mark.skipif(extension.load() is None, reason="torch's results depend on the number of rows")
def test_draws_are_the_models(model: LoadedModel) -> None:
    chances = expected(model)
    always_guess(model, proposer := Chain(chances))
    rng, count = random.Random(7), DRAWS // SEQUENCES
    asked = [
        hmt.Request(
            [rng.randrange(VOCAB)], count, ignore_eos=True,
            sampling=hmt.Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=rng.randrange(999)),
        )
        for _ in range(SEQUENCES)
    ]  # fmt: skip
    seen: Counter[tuple[int, int]] = Counter()
    for request, answer in zip(asked, model.infer_batch(asked), strict=True):
        tokens = [*request.input, *answer.token_ids]
        seen.update(pairwise(tokens))
    assert seen.total() == DRAWS
    account = model.summary().speculation
    assert DRAWS / 5 < account.accepted < account.proposed
    assert account.proposed / 5 < proposer.lookups < account.proposed
    assert abs(deviation(seen, chances)) < 3
