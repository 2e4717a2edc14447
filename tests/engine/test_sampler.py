"""The sampler against transformers' logits processors, float64, and its own distribution."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hmt.base.errors import NumericsError, RequestError
from hmt.contracts.request import Sampling
from hmt.engine.outputs.sampler import SamplerState, validate
from hmt.kernels import reference

VOCAB = 50


def random_logits(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def drawn(sampling: Sampling, logits: torch.Tensor, times: int, prompt: list[int] = []) -> Counter:  # noqa: B006
    """How often each token is the first choice of a request, over many draws."""
    state = SamplerState(sampling, prompt)
    return Counter(state.choose(logits).token_id for _ in range(times))


def expected(sampling: Sampling, logits: torch.Tensor, prompt: list[int] = []) -> torch.Tensor:  # noqa: B006
    """The distribution by transformers' processors in float64."""
    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    scores = LogitsProcessorList(processors)(
        torch.tensor([prompt], dtype=torch.int64), logits.double()[None]
    )
    return scores[0].softmax(-1)


def assert_distribution(sampling: Sampling, logits: torch.Tensor, prompt: list[int]) -> None:
    """Chi-square of 4000 draws against transformers' distribution, at one in 10^5."""
    probabilities = expected(sampling, logits, prompt)
    times = 4000
    found = drawn(sampling, logits, times, prompt)
    assert all(probabilities[token] > 0 for token in found)
    statistic, cells, rest = 0.0, 0, 0.0
    rest_found = times
    for token, probability in enumerate(probabilities.tolist()):
        if probability * times < 5:
            rest += probability
            continue
        statistic += (found[token] - probability * times) ** 2 / (probability * times)
        rest_found -= found[token]
        cells += 1
    if rest * times >= 5:
        statistic += (rest_found - rest * times) ** 2 / (rest * times)
        cells += 1
    freedom = cells - 1
    # Wilson and Hilferty's approximation of the quantile for 4.26 standard deviations.
    limit = (
        freedom * (1 - 2 / (9 * max(freedom, 1)) + 4.26 * math.sqrt(2 / (9 * max(freedom, 1)))) ** 3
    )
    assert statistic <= max(limit, 1e-9)


def test_greedy_takes_the_largest_and_the_first_of_equal_ones() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 20, 31]] = 2.0
    assert SamplerState(Sampling(), []).choose(logits).token_id == 7
    # 0 stays greedy whatever else is set
    sampling = Sampling(temperature=0, top_k=40, top_p=0.5, min_p=0.1, seed=1)
    assert drawn(sampling, logits, 20) == {7: 20}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.3),
        Sampling(temperature=2.5),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.5, top_k=10_000),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=2.0, top_k=8, top_p=0.8),
        Sampling(temperature=1.5, min_p=0.2),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.2, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
        Sampling(temperature=1.0, repetition_penalty=0.8),
    ],
)
def test_draws_follow_transformers_distribution(sampling: Sampling) -> None:
    seeded = Sampling(
        **{name: getattr(sampling, name) for name in sampling.__slots__} | {"seed": 7}
    )
    # A repetition penalty counts the drawn tokens too: all are in the prompt already.
    assert_distribution(seeded, random_logits(3), list(range(VOCAB)))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.2, 5),
    st.integers(0, 2 * VOCAB),
    st.one_of(st.floats(0.01, 0.999), st.just(1.0)),
    st.floats(0, 1),
)
def test_what_may_be_drawn_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed)
    ours = reference.support((logits - logits.max()) / temperature, top_k, top_p, min_p)
    theirs = expected(sampling, logits).nonzero().flatten()
    assert sorted(ours.tolist()) == theirs.tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 0.9999), st.floats(0.1, 4))
def test_the_nucleus_of_a_large_vocabulary(seed: int, top_p: float, spread: float) -> None:
    logits = random_logits(seed, vocab=5000, spread=spread)
    sampling = Sampling(temperature=1.0, top_p=top_p)
    ours = reference.support(logits - logits.max(), 0, top_p, 0)
    theirs = expected(sampling, logits).nonzero().flatten()
    assert abs(len(ours) - len(theirs)) <= 1  # float32 weights may round across the edge
    assert len(set(ours.tolist()) ^ set(theirs.tolist())) <= 1


def test_equal_scores_at_the_edge_of_top_k_all_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    found = drawn(Sampling(temperature=1.0, top_k=2, seed=0), logits, 300)
    assert set(found) == {1, 2, 3, 4}


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
    st.floats(0.1, 3),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_over_a_whole_answer(
    seed: int, prompt: list[int], repetition: float, frequency: float, presence: float
) -> None:
    """Greedy with penalties equals the definitions, computed anew for every token."""
    sampling = Sampling(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    state = SamplerState(sampling, prompt)
    penalise = RepetitionPenaltyLogitsProcessor(repetition)
    output: list[int] = []
    for position in range(12):
        logits = random_logits(seed + position, spread=1.0)
        scores = logits.clone()
        if prompt + output:
            scores = penalise(torch.tensor([prompt + output]), scores[None])[0]
        for token, count in Counter(output).items():
            scores[token] -= frequency * count + presence
        choice = state.choose(logits).token_id
        assert scores[choice] >= scores.max() - 1e-5
        output.append(choice)


def test_a_seed_repeats_and_neighbours_do_not_matter() -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    logits = [random_logits(number) for number in range(20)]
    alone = SamplerState(sampling, [])
    tokens = [alone.choose(row).token_id for row in logits]
    again, neighbour = SamplerState(sampling, []), SamplerState(sampling, [])
    mixed = []
    for row in logits:
        neighbour.choose(row.flip(0))
        mixed.append(again.choose(row).token_id)
        torch.rand(3)
    assert mixed == tokens
    other = SamplerState(Sampling(temperature=1.0, seed=43), [])
    assert [other.choose(row).token_id for row in logits] != tokens


def test_without_a_seed_requests_differ() -> None:
    logits = torch.zeros(1000)
    states = [SamplerState(Sampling(temperature=1.0), []) for _ in range(2)]
    first, second = ([state.choose(logits).token_id for _ in range(8)] for state in states)
    assert first != second


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_raw_logits(temperature: float) -> None:
    sampling = Sampling(
        temperature=temperature, top_k=3, repetition_penalty=1.5, seed=1, logprobs=5
    )
    logits = random_logits(11)
    before = logits.clone()
    logprob = SamplerState(sampling, [1, 2, 3]).choose(logits)
    raw = before.double().log_softmax(0)
    assert torch.equal(logits, before)
    assert logprob.logprob == pytest.approx(float(raw[logprob.token_id]), abs=1e-5)
    best = raw.topk(5)
    assert [index for index, _ in logprob.top] == best.indices.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_how_many_logprobs() -> None:
    logits = torch.zeros(4)
    states = [SamplerState(Sampling(logprobs=count), []) for count in (None, 0, 2, 20)]
    tops = [[index for index, _ in state.choose(logits).top] for state in states]
    assert tops == [[], [], [0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(bad: float, temperature: float) -> None:
    logits = random_logits(0)
    logits[[3, 30]] = bad
    state = SamplerState(Sampling(temperature=temperature), [])
    with pytest.raises(NumericsError, match=r"of 50 logits .*2 .*check that the checkpoint"):
        state.choose(logits)


def test_extreme_logits_and_temperatures() -> None:
    logits = torch.full((VOCAB,), -3e38)
    logits[9] = 3e38
    for temperature in (1e-30, 1.0, 1e30):
        sampling = Sampling(temperature=temperature, top_p=0.9, min_p=0.1, seed=0)
        assert drawn(sampling, logits, 5) == {9: 5}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True, 10**400]),
        ("top_p", [0.0, -1.0, 1.01, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("top_k", [-1, 1.5, True, 1 << 40]),
        ("seed", ["1", 1 << 63, -(1 << 63) - 1, 0.5]),
        ("logprobs", [-1, 21, 2.0]),
    ],
)
def test_values_out_of_range(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{field} is .*; give "):
            validate(Sampling(**{field: value}))
        with pytest.raises(RequestError, match=field):
            SamplerState(Sampling(**{field: value}), [])


def test_values_at_the_edges_are_fine() -> None:
    validate(Sampling())
    validate(
        Sampling(
            temperature=5,
            top_k=1,
            top_p=1e-9,
            min_p=1.0,
            repetition_penalty=0.01,
            frequency_penalty=-2,
            presence_penalty=2,
            seed=-(1 << 63),
            logprobs=20,
        )
    )
    SamplerState(Sampling(temperature=1.0, seed=-(1 << 63)), [])
    SamplerState(Sampling(temperature=1.0, seed=(1 << 63) - 1), [])


def test_biases_are_added_before_all_else() -> None:
    logits = random_logits(5)
    biased = logits.clone()
    biased[7] += 12.5
    biased[3] -= 100
    bias = ((7, 12.5), (3, -100.0))
    for others in ({}, {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.3}):
        plain = SamplerState(Sampling(**others, logprobs=2), [7, 9])
        with_bias = SamplerState(Sampling(**others, logprobs=2, logit_bias=bias), [7, 9])
        for _ in range(5):
            wanted, found = plain.choose(biased), with_bias.choose(logits)
            assert found.token_id == wanted.token_id
            assert found.top[0][0] == int(logits.argmax())  # the model's own, without the bias


@pytest.mark.parametrize("bias", [((-1, 1.0),), ((1.5, 1.0),), ((1, 101.0),), ((1, math.nan),)])
def test_biases_that_make_no_sense_are_refused(bias: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        validate(Sampling(logit_bias=bias))
