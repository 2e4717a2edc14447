"""Guesses of next tokens change no answer, whatever they are and whenever they are taken back."""

import json
import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
from draft_oracle import Oracle, always_guess
from hypothesis import given
from hypothesis import strategies as st
from reference import MINI_DENSE, MINI_MOE
from single_answers import SingleAnswers

import hmt
from hmt.base.errors import ConfigError
from hmt.contracts.request import Grammar, GrammarKind
from hmt.engine import LoadedModel
from hmt.engine.speculation.draft import Draft
from hmt.engine.speculation.gate import SpeculationGate, StepTimes
from hmt.engine.speculation.prompt_lookup import LEAST_MATCH, PromptLookup, TokenIndex
from hmt.kernels.cpu import extension
from hmt_bench.open_gate import UpTo

pytestmark = pytest.mark.each_once

OPTIONS: dict[str, Any] = {"host_memory": "320MiB", "max_prefill_tokens": 64, "context": 1024}
MODELS = {"mini-dense": MINI_DENSE, "mini-moe": MINI_MOE}
WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "disk": {"host_memory": "6MiB", "context": 512, "max_batch": 2},
    "plain": {"executor": "plain", "dtype": "float32"},
    "levels": {"kv_gpu_memory": "4608KiB", "max_prefill_tokens": 32, "prefix_cache": True},
}
FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
needs_kernels = pytest.mark.skipif(
    extension.load() is None, reason="torch's results depend on the number of rows"
)


def requests(seed: int) -> list[hmt.Request]:
    """Greedy, drawn, penalised, with a form, with a stop string, with log-probabilities."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(16, 500) for _ in range(count)]

    drawn = hmt.Sampling(temperature=1.0, top_k=8, seed=seed)
    penalised = hmt.Sampling(
        temperature=0.7, seed=seed, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2
    )
    return [
        hmt.Request(ids(20), 40, ignore_eos=True),
        hmt.Request(ids(70), 40, sampling=drawn, ignore_eos=True),
        hmt.Request(ids(33), 40, sampling=penalised, ignore_eos=True),
        hmt.Request("Make JSON.", 24, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(FORM))),
        hmt.Request("Say the alphabet.", 40, stop=("e", "o")),
    ]


@pytest.fixture(scope="module", params=MODELS)
def answers(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[hmt.Completion]]]:
    """Answers without guesses."""
    with hmt.Engine(**OPTIONS | {"speculate": "off"}) as engine:
        model = engine.load_model(MODELS[request.param])
        yield request.param, [model.infer(one) for one in requests(1)]


def prompts(model: LoadedModel, asked: list[hmt.Request]) -> list[list[int]]:
    encode = model.tokenizer.encode
    return [encode(one.input) if isinstance(one.input, str) else list(one.input) for one in asked]


@needs_kernels
@pytest.mark.parametrize("way", WAYS)
def test_guesses_change_no_answer(answers: tuple[str, list[hmt.Completion]], way: str) -> None:
    """All at once, in batches in which some guess; tokens, texts, log-probabilities, reasons."""
    name, wanted = answers
    asked = requests(1)
    if WAYS[way].get("dtype"):  # answers in f32 are others
        with hmt.Engine(**OPTIONS | WAYS[way] | {"speculate": "off"}) as engine:
            wanted = [engine.load_model(MODELS[name]).infer(one) for one in asked]
    with hmt.Engine(**OPTIONS | WAYS[way]) as engine:
        model = engine.load_model(MODELS[name])
        known = [
            [*prompt, *answer.token_ids]
            for prompt, answer in zip(prompts(model, asked), wanted, strict=True)
        ]
        always_guess(model, Oracle(known, seed=3))
        streams = [model.stream(one) for one in asked]
        found = [stream.completion() for stream in streams]
        account = model.summary().speculation
        generated = model.summary().generation.tokens
    assert found == wanted
    assert account.accepted > 20 and account.proposed > account.accepted
    first, *_ = account.by_depth
    assert first[0] >= account.steps and sum(right for _, right in account.by_depth) == (
        account.accepted
    )
    assert generated == sum(len(one.token_ids) for one in found) - len(found)  # prompts give one


@needs_kernels
@given(seed=st.integers(0, 999), wrong=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_any_pattern_of_right_and_wrong(loaded: LoadedModel, seed: int, wrong: float) -> None:
    alone = ANSWERS[loaded]
    rng = random.Random(seed)
    asked = [
        hmt.Request(
            [20 + (7 * n) % 300 for n in range(rng.choice([5, 30]))],
            rng.choice([1, 9, 40]),
            sampling=hmt.Sampling(temperature=0.8, seed=rng.randrange(3)),
            ignore_eos=True,
        )
        for _ in range(rng.randint(1, 3))
    ]
    speculator = loaded._core.speculator
    speculator._proposer = None
    wanted = [alone(one) for one in asked]
    known = [[*one.input, *answer] for one, answer in zip(asked, wanted, strict=True)]
    always_guess(loaded, Oracle(known, seed, wrong))
    streams = [loaded.stream(one) for one in asked]
    assert [stream.completion().token_ids for stream in streams] == wanted


ANSWERS: dict[LoadedModel, SingleAnswers] = {}


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    with hmt.Engine(**OPTIONS | {"prefix_cache": True}) as engine:
        model = engine.load_model(MINI_DENSE)
        ANSWERS[model] = SingleAnswers(model)
        yield model
        ANSWERS.clear()


def test_lookup_guesses_where_an_answer_repeats() -> None:
    """Through the whole engine, by itself: a prompt that is repeated word for word."""
    ids = [20 + (11 * n) % 180 for n in range(40)]
    request = hmt.Request(ids * 3, 60, ignore_eos=True)
    with hmt.Engine(**OPTIONS | {"speculate": "off"}) as engine:
        model = engine.load_model(MINI_DENSE)
        wanted = model.infer(request).token_ids
        assert not model.summary().speculation.proposed
    with hmt.Engine(**OPTIONS | {"speculate": "lookup"}) as engine:
        model = engine.load_model(MINI_DENSE)
        for _ in range(3):  # the second time the first answer is known
            assert model.infer(request).token_ids == wanted
        account = model.summary().speculation
        if extension.load() is None:
            assert not account.proposed
        else:
            assert account.accepted
        model.reset_summary()
        assert model.summary().speculation.proposed == 0


def test_unknown_ways_to_speculate_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of auto, off, lookup, mtp, draft=PATH"):
        hmt.Engine(speculate="often")


# What looks up


@given(st.data())
def test_the_index_finds_the_longest_of_the_last_places(data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, 2), min_size=LEAST_MATCH, max_size=60))
    index, length = TokenIndex(), 0
    while length < len(text):  # grows in any pieces
        length += data.draw(st.integers(1, 20))
        index.extend(text[:length])
    matched, position = index.find(text)
    ends = [end for end in range(LEAST_MATCH, len(text)) if text[end - 3 : end] == text[-3:]]
    if not ends:
        assert (matched, position) == (0, 0)
        return
    assert matched >= LEAST_MATCH and text[position - matched : position] == text[-matched:]
    last = ends[-8:]

    def equal(end: int) -> int:
        return next((n for n in range(end) if text[end - 1 - n] != text[-1 - n]), end)

    assert matched == max(min(32, equal(end)) for end in last)


def test_sequences_of_other_scopes_are_not_looked_at() -> None:
    lookup, text = PromptLookup(), list(range(100, 120))

    def guessed(number: int, scope: str, tokens: list[int]) -> tuple[int, ...]:
        return lookup.propose(number, scope, tokens, 4, UpTo()).tokens

    assert guessed(1, "a", text) == ()
    lookup.ended(1)
    assert guessed(2, "a", text[:10]) == (110, 111, 112, 113)
    assert guessed(3, "b", text[:10]) == ()


def test_long_texts_keep_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmt.engine.speculation import prompt_lookup

    monkeypatch.setattr(prompt_lookup, "_MOST_TOKENS", 64)
    text = [n % 20 for n in range(500)]
    index = TokenIndex()
    for length in range(1, len(text) + 1):
        index.extend(text[:length])
        assert len(index.tokens) <= 64 and index.tokens == text[length - len(index.tokens) : length]
    matched, position = index.find(text)
    assert matched and index.tokens[position] == 500 % 20


# What chooses


def chosen(gate: SpeculationGate, names: str) -> Draft:
    """What the gate lets pass of guesses of these classes."""
    classes = tuple(takewhile(gate.worth(1, 0), names)) if gate.is_open else ()
    return Draft((7,) * len(classes), classes)


@given(
    st.lists(st.tuples(st.integers(1, 16), st.floats(0.001, 1.0)), min_size=2, max_size=40),
    st.lists(st.booleans(), max_size=60),
)
def test_a_guess_pays_by_what_was_measured(
    steps: list[tuple[int, float]], results: list[bool]
) -> None:
    gate = SpeculationGate()
    for tokens, seconds in steps:
        gate.times.add(tokens, seconds)
    for right in results:
        gate.verified(Draft((1,), ("a",)), int(right))
    known = gate.classes.get("a")
    rate = 0.5 if known is None else known.rate
    cost, seconds = gate.times.per_token, gate.times.of(1)
    expected, likely = 1.0, 1.0
    for _ in chosen(gate, "a" * 8).tokens:
        before = expected / seconds
        likely *= rate
        expected, seconds = expected + likely, seconds + cost
        assert expected / seconds >= before * (1 - 1e-9)


def test_the_line_through_steps_is_the_one_they_lie_on() -> None:
    times = StepTimes()
    for number in range(50):
        times.add(1 + number % 7, 0.010 + 0.002 * (number % 7))
    assert times.per_token == pytest.approx(0.002) and times.of(1) == pytest.approx(0.010)


def test_losses_pause_and_trials_come_later_and_later() -> None:
    """Guesses that are never right in steps that take twice as long."""
    gate, guessed = SpeculationGate(), 0
    for _ in range(4000):
        draft = chosen(gate, "ab")
        count = len(draft.tokens)
        if count:
            gate.verified(draft, 0)
            guessed += 1
        gate.step_took(1 + count, 1, 0.010 * (1 + count), drafting=bool(count))
    assert guessed < 80  # 2% of the steps


def test_what_was_never_right_is_used_once_it_is() -> None:
    gate, used = SpeculationGate(), 0
    for number in range(6000):
        draft, right = chosen(gate, "aaa"), number >= 2000
        count = len(draft.tokens)
        if count:
            gate.verified(draft, count * right)
            used += number >= 5000
        seconds = 0.010 * (1 + 0.1 * count)
        gate.step_took(1 + count, 1 + count * right, seconds, drafting=bool(count))
    assert used > 900


def test_steps_that_did_something_else_as_well_do_not_count_for_long() -> None:
    """The first draft tokens of all take seconds, as where kernels are compiled for them."""
    gate, used, first = SpeculationGate(), 0, 3
    for _ in range(400):
        count = len(chosen(gate, "aaaa").tokens)
        if count:
            gate.verified(Draft((7,) * count, ("a",) * count), count)
            used += 1
        slow = 2.0 if count and first else 0.0
        first -= bool(slow)
        seconds = 0.004 + 0.0002 * count + slow
        gate.step_took(1 + count, 1 + count, seconds, drafting=bool(count))
    assert used > 200  # of 400; 153 where the long ones count whole


def test_a_branch_is_worth_it_where_the_draft_is_often_wrong() -> None:
    gate = SpeculationGate()
    for tokens in (1, 2) * 20:
        gate.step_took(tokens, 1, 0.010 + 0.0005 * tokens, drafting=tokens > 1)
    draft, other = Draft((5, 6), ("a", "b")), Draft((7, 8), ("c", "b"))
    for _ in range(200):
        gate.verified(draft, 0)
        gate.verified(other, 2)
    assert gate.worth_beside(other, [draft], 1, 2) == 2
    for _ in range(300):  # the first one is right now, and the other has no chance
        gate.verified(draft, 2)
    assert gate.worth_beside(other, [draft], 1, 2) == 0


def test_lookup_offers_what_followed_elsewhere() -> None:
    same = [50, 51, 52]
    text = [*same, 60, 61, 9, *same, 70, 71, 10, 40, *same, 70, 72, 11, 40, *same]
    draft = PromptLookup().propose(1, "", text, 2, UpTo())
    assert draft.tokens == (70, 72)
    assert [other.tokens for other in draft.alternatives] == [(60, 61)]
    assert draft.classes[0].startswith("lookup") and (
        draft.alternatives[0].classes[0].startswith("other")
    )


def test_where_a_token_more_is_dear_only_what_is_likely_is_tried() -> None:
    """Experts on the disk: before steps with drafts were measured, their bytes are counted."""
    gate = SpeculationGate(StepTimes(first_cost=0.7))
    for _ in range(3):
        gate.step_took(1, 1, 0.1, drafting=False)
    assert not chosen(gate, "ab").tokens
    sure = takewhile(gate.worth(1, 0), ["lookup >16"] * 8)
    assert 1 <= len(list(sure)) <= 2
    for _ in range(40):  # it costs little after all
        gate.step_took(2, 2, 0.105, drafting=True)
    assert chosen(gate, "ab").tokens
