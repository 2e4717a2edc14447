"""Log-probabilities of prompts, and answers without a token: what harnesses ask of completions."""

import asyncio
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from serving import NAME, app_on, at_rest, events_of, http, run

import hmt
from hmt.bench.quality import short_tasks
from hmt.cli.eval import held_out_text
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel

TEXT = "/v1/completions"
LM_EVAL = {"model": NAME, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
           "echo": True}  # fmt: skip


def scores(model: LoadedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """By teacher forcing: log-probabilities of tokens[1:], and of the likeliest in their place."""
    found = model.logits(tokens, range(len(tokens) - 1)).log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], found.amax(-1)


def close(one: list[float], other: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(one), other, rtol=1e-4, atol=1e-4)


async def asked(app: FastAPI, **fields: Any) -> Any:
    async with http(app) as client:
        answer = await client.post(TEXT, json={"model": NAME, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text) if fields.get("stream") else answer.json()


def test_echo_tells_what_the_model_thought_of_the_prompt(app: FastAPI, model: LoadedModel) -> None:
    """Texts, ids and lists of them, long ones in several chunks, beside each other."""
    text = held_out_text(None)[:6500]
    ids = model.tokenizer.encode(text)
    assert len(ids) > 2 * model.plan.max_prefill_tokens
    prompts: list[Any] = [
        ids[:300],
        text,
        "Once",
        [text[:500], text[200:900]],
        [ids[:7], ids[3:40]],
    ]

    async def work() -> list[Any]:
        sent = (asked(app, prompt=one, echo=True, logprobs=2, max_tokens=0) for one in prompts)
        return list(await asyncio.gather(*sent))

    for prompt, body in zip(prompts, run(work()), strict=True):
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        given = [prompt] if alone else prompt
        assert body["usage"]["completion_tokens"] == 0
        assert [choice["index"] for choice in body["choices"]] == list(range(len(given)))
        for one, choice in zip(given, body["choices"], strict=True):
            tokens = model.tokenizer.encode(one) if isinstance(one, str) else one
            assert choice["text"] == model.tokenizer.decode(tokens)
            assert choice["finish_reason"] == "length"
            told = choice["logprobs"]
            assert all(len(told[name]) == len(tokens) for name in told)
            assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
            assert "".join(told["tokens"]) == choice["text"]
            assert [choice["text"][at] for at in told["text_offset"]] == [
                t[0] for t in told["tokens"]
            ]
            if len(tokens) > 1:
                wanted, best = scores(model, tokens)
                close(told["token_logprobs"][1:], wanted)
                close([max(top.values()) for top in told["top_logprobs"][1:]], best)
    assert at_rest(model)


@pytest.mark.parametrize("stream", [False, True])
def test_what_follows_is_what_follows_without_echo(
    app: FastAPI, model: LoadedModel, stream: bool
) -> None:
    prompts = ["Once upon a time", "The capital"]
    wanted = {
        "prompt": prompts,
        "logprobs": 1,
        "max_tokens": 6,
        "n": 2,
        "seed": 3,
        "stream": stream,
    }

    def choices(body: Any) -> list[Any]:
        if not stream:
            return body["choices"]
        whole: list[Any] = [
            {"index": n, "text": "", "logprobs": {"tokens": [], "token_logprobs": [],
             "top_logprobs": [], "text_offset": []}} for n in range(4)
        ]  # fmt: skip
        for event in body:
            for part in event["choices"]:
                mine = whole[part["index"]]
                mine["text"] += part["text"]
                mine["finish_reason"] = part["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    mine["logprobs"][name] += values
        return whole

    plain = choices(run(asked(app, temperature=1, **wanted)))
    echoed = choices(run(asked(app, temperature=1, echo=True, **wanted)))
    for number, (one, other) in enumerate(zip(plain, echoed, strict=True)):
        prompt = prompts[number // 2]
        tokens = model.tokenizer.encode(prompt)
        assert other["text"] == prompt + one["text"]
        assert other["finish_reason"] == one["finish_reason"]
        theirs, mine = one["logprobs"], other["logprobs"]
        assert mine["tokens"][len(tokens) :] == theirs["tokens"]
        close(mine["token_logprobs"][1 : len(tokens)], scores(model, tokens)[0])
        close(mine["token_logprobs"][len(tokens) :], torch.tensor(theirs["token_logprobs"]))
        assert mine["text_offset"][len(tokens) :] == [
            len(prompt) + at for at in theirs["text_offset"]
        ]


def test_nothing_but_the_prompt(app: FastAPI) -> None:
    for stream in (False, True):
        body = run(asked(app, prompt="Once", echo=True, max_tokens=0, n=2, stream=stream))
        parts = [part for event in (body if stream else [body]) for part in event["choices"]]
        for index in (0, 1):
            mine = [part for part in parts if part["index"] == index]
            assert "".join(part["text"] for part in mine) == "Once"
            assert mine[-1]["finish_reason"] == "length"
            assert all(part["logprobs"] is None for part in mine)


def test_a_prompt_that_is_held_is_scored_all_the_same() -> None:
    """The prefix cache has keys and values, and no logits."""
    options = {"host_memory": "64MiB", "dtype": "float32", "context": 512, "prefix_cache": True}
    with hmt.Engine(**options) as engine, engine.load_model(embedded_model()) as model:
        tokens = model.tokenizer.encode("Once upon a time there was a small house. " * 6)
        request = hmt.Request(tokens, 0, prompt_logprobs=0)
        app, wanted = app_on(model), scores(model, tokens)[0]
        model._core.runner.executor._outputs._rows = 7  # type: ignore[attr-defined]
        for _ in range(2):
            found = model.infer(request)
            assert (found.text, found.finish_reason.value) == ("", "length")
            close([one.logprob for one in found.prompt_logprobs], wanted)
        assert model.infer(hmt.Request(tokens, 3)).token_ids
        told = run(asked(app, prompt=tokens, max_tokens=2))
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_lm_eval_harness_finds_the_score_of_hmt_eval(app: FastAPI, model: LoadedModel) -> None:
    """Its client local-completions asks and reads like this (lm_eval 0.4.13).

    scripts/lm-eval-check does the same with its own client.
    """

    def loglikelihood(parts: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of continuations behind contexts, and whether they are what greedy decoding writes."""
        body = run(asked(app, prompt=[before + after for before, after in parts], **LM_EVAL))
        found = []
        for choice, (before, _) in zip(body["choices"], parts, strict=True):
            told = choice["logprobs"]
            own = told["token_logprobs"][len(before) : -1]
            top = told["top_logprobs"][len(before) : -1]
            greedy = all(one == max(best.values()) for one, best in zip(own, top, strict=True))
            found.append((sum(own), greedy))
        return found

    quizzes = list(short_tasks(model.tokenizer.encode, 16))
    parts = [(q.tokens[: q.answers[0][0]], list(q.answers[0][1])) for q in quizzes]
    found = [one for n in (0, 8) for one in loglikelihood(parts[n : n + 8])]
    for (before, after), (total, greedy) in zip(parts, found, strict=True):
        wanted, best = (rows[len(before) - 1 :] for rows in scores(model, before + after))
        assert greedy == bool(torch.equal(wanted, best))
        assert total == pytest.approx(float(wanted.sum()), abs=1e-3)
    assert 0 < sum(greedy for _, greedy in found) <= len(found)
    text = model.tokenizer.encode(held_out_text(None)[:12000])[:2047]
    ((total, _),) = loglikelihood([(text[:1], text[1:])])
    own = -sum(scores(model, text)[0].tolist())
    assert -total == pytest.approx(own, rel=1e-5)
