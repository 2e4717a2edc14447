"""The engine's API: batches, streams, stops, seeds, threads, and what the summary counts."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from reference import MINI_DENSE

import hmt
from hmt.contracts.request import FinishReason
from hmt.engine import LoadedModel

QUESTIONS = [
    "What is 12 + 30?",
    "Reverse: apple ring boat drum",
    "Repeat: coin",
    "Make JSON: Vera is 31 years old, owns a kite and lives near the tower.",
    "A = 17. B = A. C = B. What is C?",
]


def chat(question: str, max_new_tokens: int = 40, **options: object) -> hmt.Request:
    return hmt.Request([{"role": "user", "content": question}], max_new_tokens, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    with hmt.Engine(host_memory="8MiB", context=512, dtype="float32", max_batch=4) as engine:
        yield engine.load_model(MINI_DENSE)


def test_answers_do_not_depend_on_the_neighbours(model: LoadedModel) -> None:
    alone = [model.infer(chat(question)) for question in QUESTIONS]
    together = model.infer_batch([chat(question) for question in QUESTIONS])
    assert [a.text for a in alone] == [a.text for a in together]
    assert alone[0].text == "42" and alone[0].finish_reason is FinishReason.STOP
    assert alone[4].text == "17"


def test_a_stream_is_the_answer_in_pieces(model: LoadedModel) -> None:
    for question in QUESTIONS:
        events = list(model.stream(chat(question)))
        whole = model.infer(chat(question))
        assert "".join(event.text for event in events) == whole.text
        assert tuple(event.token_id for event in events) == whole.token_ids
        assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason is whole.finish_reason


def test_stop_strings_end_the_answer_and_are_not_part_of_it(model: LoadedModel) -> None:
    whole = model.infer(chat(QUESTIONS[3])).text
    for stop in (' "age"', "31", "tower", "e", "never seen"):
        answer = model.infer(chat(QUESTIONS[3], stop=(stop,)))
        assert answer.text == whole.split(stop)[0]
        assert answer.finish_reason is FinishReason.STOP


def test_max_new_tokens_and_ignore_eos(model: LoadedModel) -> None:
    short = model.infer(chat(QUESTIONS[1], max_new_tokens=2))
    assert len(short.token_ids) == 2 and short.finish_reason is FinishReason.LENGTH
    long = model.infer(chat(QUESTIONS[0], max_new_tokens=30, ignore_eos=True))
    assert len(long.token_ids) == 30 and long.finish_reason is FinishReason.LENGTH


def test_a_seed_repeats_and_does_not_depend_on_neighbours(model: LoadedModel) -> None:
    def request(seed: int) -> hmt.Request:
        sampling = hmt.Sampling(temperature=1.5, top_p=0.95, seed=seed)
        return hmt.Request("Once upon a time", 24, sampling=sampling, ignore_eos=True)

    first, again, other = (model.infer(request(seed)).token_ids for seed in (1, 1, 2))
    assert first == again != other
    batched = model.infer_batch([request(2), request(1)])
    assert [answer.token_ids for answer in batched] == [other, first]


def test_logprobs_are_those_of_the_logits(model: LoadedModel) -> None:
    sampling = hmt.Sampling(logprobs=3)
    request = hmt.Request(
        model.tokenizer.encode("It was a dark"), 5, sampling=sampling, ignore_eos=True
    )
    answer = model.infer(request)
    assert isinstance(request.input, list)
    tokens = [*request.input, *answer.token_ids]
    rows = range(len(request.input) - 1, len(tokens) - 1)
    expected = model.logits(tokens, rows, prefill=len(request.input)).log_softmax(-1)
    for entry, row in zip(answer.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        top = row.topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert entry.token_id == entry.top[0][0]


def test_decoding_agrees_with_prefill(model: LoadedModel) -> None:
    tokens = torch.randint(8, 4000, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    at_once = model.logits(tokens, range(90))
    one_by_one = model.logits(tokens, range(90), prefill=0)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)


def test_threads_share_the_model(model: LoadedModel) -> None:
    expected = [model.infer(chat(question)).text for question in QUESTIONS]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = model.infer(chat(QUESTIONS[number])).text

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[n] for n in range(len(QUESTIONS))] == expected


def test_the_summary_counts_tokens_and_bytes(model: LoadedModel) -> None:
    model.reset_summary()
    answer = model.infer(chat(QUESTIONS[0]))
    summary = model.summary()
    assert summary.prompt.tokens == answer.prompt_tokens
    assert summary.generation.tokens == len(answer.token_ids) - 1  # the first is the prompt's
    streamed = sum(
        layout.read_bytes
        for block, layout in model.prepared.layouts.items()
        if model.plan.homes[block] == "disk" and layout.placed
    )
    per_token = summary.generation.disk_bytes / summary.generation.tokens
    assert per_token <= 1.1 * streamed + 65536, "nothing is read twice in a step"
    assert summary.budget_bytes == 8 << 20
    assert sum(summary.used_bytes.values()) <= summary.budget_bytes
    assert {pool.purpose: pool.backed_bytes for pool in summary.pools}.items() <= (
        summary.used_bytes.items()
    )
    slots = next(pool for pool in summary.pools if pool.purpose == "slots")
    assert 0 < slots.in_use_bytes <= slots.peak_bytes <= slots.limit_bytes
    assert slots.internal == 0, "a slot is exactly its block"
    assert summary.bottleneck is not None and summary.bottleneck.link == "disk"
    assert 0 < summary.generation.waited_s <= summary.generation.seconds


def test_a_summary_stays_as_it_is(model: LoadedModel) -> None:
    model.infer(chat(QUESTIONS[0]))
    before = model.summary()
    counted = [replace(phase) for phase in (before.prompt, before.generation)]
    model.infer(chat(QUESTIONS[1]))
    assert [before.prompt, before.generation] == counted
    assert model.summary().generation.tokens > before.generation.tokens
