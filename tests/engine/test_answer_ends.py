"""When answers end: min_tokens and stop_token_ids, beside transformers' processors of logits."""

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor

import hmt
from hmt.base.errors import RequestError
from hmt.cli.options import embedded_model
from hmt.contracts.request import FinishReason, Grammar, GrammarKind, Request, Sampling
from hmt.engine import LoadedModel

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    with hmt.Engine(host_memory="64MiB", dtype="float32", context=512, max_batch=4) as engine:
        yield engine.load_model(embedded_model())


def theirs(
    model: LoadedModel, prompt: list[int], least: int, most: int, ends: list[int]
) -> list[int]:
    """A greedy answer, token by token from this model's logits with transformers' processor."""
    processors = LogitsProcessorList()
    if least and ends:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, ends, device="cpu"))
    tokens = list(prompt)
    for _ in range(most):
        logits = model.logits(tokens, [len(tokens) - 1])
        tokens.append(int(processors(torch.tensor([tokens]), logits.clone()).argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_transformers(model: LoadedModel, seed: int) -> None:
    chance = random.Random(seed)
    prompt = model.tokenizer.chat_prompt(QUESTION)
    plain = model.infer(Request(prompt, 24)).token_ids
    stops = tuple(chance.sample([*plain, *range(2, 4096, 999)], chance.randrange(3)))
    least, ignore = chance.choice([0, 0, 5, 12, 24]), chance.random() < 0.3
    ends = [*stops, *(() if ignore else model.tokenizer.eos_ids)]
    request = Request(prompt, 24, stop_token_ids=stops, min_tokens=least, ignore_eos=ignore)
    ours = model.infer(request)
    assert list(ours.token_ids) == theirs(model, prompt, least, 24, ends)
    ended = ours.token_ids[-1] in ends
    assert ours.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
    text = ours.token_ids[:-1] if ended else ours.token_ids
    assert ours.text == model.tokenizer.decode(text)


def test_sampled_answers_have_their_tokens_too(model: LoadedModel) -> None:
    prompt = model.tokenizer.chat_prompt(QUESTION)
    for seed in range(5):
        sampling = Sampling(temperature=1.5, seed=seed)
        done = model.infer(Request(prompt, 40, sampling=sampling, min_tokens=30))
        assert len(done.token_ids) >= 30
        assert not model.tokenizer.eos_ids & set(done.token_ids[:30])


def test_stop_strings_wait_for_min_tokens(model: LoadedModel) -> None:
    plain = model.infer(Request("Once upon a time", 20))
    pieces = [model.tokenizer.decode([token]) for token in plain.token_ids]
    stop = next(piece for piece in pieces[2:] if len(piece) > 2)
    first = pieces.index(stop)
    for least in (first, first + 1, first + 2):
        done = model.infer(Request("Once upon a time", 20, stop=stop, min_tokens=least))
        assert len(done.token_ids) >= least
        begin = len("".join(pieces[: least - 1])) if least else 0
        place = plain.text.find(stop, begin)
        assert done.text == (plain.text if place < 0 else plain.text[:place])


def test_a_form_that_is_complete_ends_sooner(model: LoadedModel) -> None:
    grammar = Grammar(GrammarKind.CHOICE, '["yes", "no"]')
    done = model.infer(Request("Is it?", 20, grammar=grammar, min_tokens=20))
    assert done.text in ("yes", "no")
    longer = Grammar(GrammarKind.REGEX, "a*")
    done = model.infer(Request("Is it?", 20, grammar=longer, min_tokens=9))
    assert len(done.token_ids) >= 9 and set(done.text) == {"a"}


@pytest.mark.parametrize(("fields", "told"), [
    ({"min_tokens": 21}, "min_tokens is 21; the answer has 20 tokens"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"min_tokens": 2.5}, "min_tokens is 2.5"),
    ({"stop_token_ids": (4096,)}, "token id 4096"),
    ({"stop_token_ids": ("a",)}, "token id 'a'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(
    model: LoadedModel, fields: dict[str, object], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        model.infer(Request("Hi", 20, **fields))


def test_a_beam_search_ends_at_stop_tokens(model: LoadedModel) -> None:
    plain = model.infer(Request("Once upon a time", 12)).token_ids
    (best,) = model.beam_search(Request("Once upon a time", 12, stop_token_ids=plain[3:4]), 1)
    assert best.token_ids == plain[: plain.index(plain[3]) + 1]
    with pytest.raises(RequestError, match="min_tokens"):
        model.beam_search(Request("Once upon a time", 12, min_tokens=3), 1)
