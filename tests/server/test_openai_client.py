"""OpenAI's own client against the server."""

import json
from collections.abc import Callable
from typing import Any

import openai as package
import pytest
from fastapi import FastAPI
from serving import CHAT, NAME, app_on, asking, http, openai, run

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.server import KeyRing

GREEDY = {"model": NAME, "temperature": 0}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def alone(model: LoadedModel, text: str, new: int, **sampling: object) -> hmt.Completion:
    return model.infer(hmt.Request(text, new, sampling=hmt.Sampling(**sampling)))


def test_models_are_listed(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            assert [one.id async for one in client.models.list()] == [NAME]
            assert (await client.models.retrieve(NAME)).owned_by == "hmt"
            with pytest.raises(package.NotFoundError) as error:
                await client.models.retrieve("other")
            assert error.value.code == "model_not_found" and error.value.param == "model"

    run(work())


def test_a_chat_is_answered(app: FastAPI, model: LoadedModel) -> None:
    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.create(**GREEDY, messages=QUESTION)
        ids = model.tokenizer.chat_prompt(QUESTION)
        wanted = model.infer(hmt.Request(ids, 64))
        choice = done.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
        assert choice.finish_reason == "stop" and choice.logprobs is None
        assert done.usage.prompt_tokens == len(ids)
        assert done.usage.completion_tokens == len(wanted.token_ids)
        assert done.usage.total_tokens == len(ids) + len(wanted.token_ids)
        assert done.id.startswith("chatcmpl-") and done.model == NAME

    run(work())


def test_a_stream_says_the_same(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            whole = await client.chat.completions.create(
                **GREEDY, messages=QUESTION, logprobs=True, top_logprobs=3, n=2
            )
            stream = await client.chat.completions.create(
                **GREEDY, messages=QUESTION, logprobs=True, top_logprobs=3, n=2, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
        for number, wanted in enumerate(whole.choices):
            parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == number]
            assert parts[0].delta.role == "assistant"
            text = "".join(part.delta.content or "" for part in parts)
            assert text == wanted.message.content
            reasons = [part.finish_reason for part in parts]
            assert reasons[-1] == wanted.finish_reason and set(reasons[:-1]) == {None}
            found = [one for part in parts if part.logprobs for one in part.logprobs.content]
            assert found == wanted.logprobs.content

    run(work())


def test_without_being_asked_a_stream_has_no_usage(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            stream = await client.chat.completions.create(**GREEDY, messages=QUESTION, stream=True)
            chunks = [chunk async for chunk in stream]
        assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)

    run(work())


def test_logprobs_are_the_models(app: FastAPI, model: LoadedModel) -> None:
    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.create(
                **GREEDY, messages=QUESTION, logprobs=True, top_logprobs=4
            )
        ids = model.tokenizer.chat_prompt(QUESTION)
        wanted = model.infer(hmt.Request(ids, 64, sampling=hmt.Sampling(logprobs=4)))
        found = done.choices[0].logprobs.content
        assert [one.logprob for one in found] == [w.logprob for w in wanted.logprobs][: len(found)]
        for one, known in zip(found, wanted.logprobs, strict=False):
            assert [top.logprob for top in one.top_logprobs] == [value for _, value in known.top]
            assert bytes(one.bytes) == model.tokenizer.token_bytes(known.token_id)
        assert "".join(one.token for one in found) == done.choices[0].message.content

    run(work())


def test_seeds_make_choices_repeatable_and_different(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:

            async def answers(seed: int) -> list[str]:
                done = await client.completions.create(
                    model=NAME, prompt="Once upon a time", n=4, seed=seed, temperature=2,
                    max_tokens=12,
                )  # fmt: skip
                assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
                assert done.usage.completion_tokens <= 48
                return [choice.text for choice in done.choices]

            first = await answers(3)
            assert first == await answers(3)
            assert len(set(first)) > 1 and first[1:] == (await answers(4))[:3]

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_answers(app: FastAPI, model: LoadedModel, stream: bool) -> None:
    wanted = alone(model, "Once upon a time", 30).text
    stop = wanted[8:10]

    async def work() -> None:
        async with openai(app) as client:
            done = await client.completions.create(
                **GREEDY, prompt="Once upon a time", max_tokens=30, stop=["\x00", stop],
                stream=stream,
            )  # fmt: skip
            if stream:
                parts = [chunk.choices[0] async for chunk in done]
                text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
            else:
                text, reason = done.choices[0].text, done.choices[0].finish_reason
        assert text == wanted[: wanted.index(stop)] and reason == "stop"

    run(work())


def test_logit_bias_forbids_and_forces(app: FastAPI, model: LoadedModel) -> None:
    first = alone(model, "Once upon a time", 1).token_ids[0]

    async def work() -> None:
        async with openai(app) as client:

            async def token(bias: dict[str, int]) -> str:
                done = await client.completions.create(
                    **GREEDY, prompt="Once upon a time", max_tokens=1, logit_bias=bias, logprobs=0
                )
                return done.choices[0].logprobs.tokens[0]

            assert await token({}) == model.tokenizer.token_bytes(first).decode()
            assert await token({str(first): -100}) != await token({})
            assert await token({"300": 100}) == model.tokenizer.token_bytes(300).decode()

    run(work())


def test_several_prompts_and_choices_come_in_order(app: FastAPI, model: LoadedModel) -> None:
    texts = ["Once upon a time", "The sum of 3 and 4 is", "A"]
    wanted = [alone(model, text, 9).text for text in texts]

    async def work() -> None:
        async with openai(app) as client:
            done = await client.completions.create(
                **GREEDY, prompt=texts, max_tokens=9, n=2, echo=True
            )
            assert [choice.text for choice in done.choices] == [
                text + answer for text, answer in zip(texts, wanted, strict=True) for _ in range(2)
            ]
            ids = [model.tokenizer.encode(text) for text in texts]
            again = await client.completions.create(**GREEDY, prompt=ids, max_tokens=9)
            assert [choice.text for choice in again.choices] == wanted
            stream = await client.completions.create(
                **GREEDY, prompt=texts, max_tokens=9, echo=True, stream=True
            )
            parts: dict[int, str] = {}
            async for chunk in stream:
                for one in chunk.choices:
                    parts[one.index] = parts.get(one.index, "") + one.text
            assert [parts[n] for n in range(3)] == [
                text + answer for text, answer in zip(texts, wanted, strict=True)
            ]

    run(work())


def test_the_best_of_several_is_the_likeliest(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            options = {"model": NAME, "prompt": "Once", "seed": 5, "temperature": 2.0,
                       "max_tokens": 8, "extra_body": {"ignore_eos": True}}  # fmt: skip
            every = await client.completions.create(**options, n=4, logprobs=0)
            best = await client.completions.create(**options, n=1, best_of=4, logprobs=0)
        likeliest = max(every.choices, key=lambda one: sum(one.logprobs.token_logprobs))
        assert best.choices[0].text == likeliest.text
        assert best.usage.completion_tokens == every.usage.completion_tokens

    run(work())


def test_offsets_of_tokens_say_where_they_are(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            done = await client.completions.create(
                **GREEDY, prompt="Once upon a time", max_tokens=12, logprobs=2
            )
        choice = done.choices[0]
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            if not token.startswith("bytes:"):
                assert choice.text.startswith(token, offset)
        assert all(len(top) == 2 for top in found.top_logprobs)

    run(work())


def test_what_is_left_out_of_max_tokens(app: FastAPI, model: LoadedModel) -> None:
    """16 tokens for a completion, as OpenAI; the server's default for a chat."""

    async def work() -> None:
        async with openai(app) as client:
            done = await client.completions.create(
                **GREEDY, prompt="Once upon a time", extra_body={"ignore_eos": True}
            )
            assert (done.usage.completion_tokens, done.choices[0].finish_reason) == (16, "length")
            short = await client.chat.completions.create(
                **GREEDY, messages=QUESTION, max_completion_tokens=1
            )
            assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (1, "length")

    run(work())


def test_parts_and_developers_are_understood(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            plain = await client.chat.completions.create(
                **GREEDY, messages=[{"role": "system", "content": "Be brief."}, *QUESTION]
            )
            other = await client.chat.completions.create(
                **GREEDY,
                messages=[
                    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                    *QUESTION,
                ],
            )
        assert other.choices[0].message == plain.choices[0].message
        assert other.usage == plain.usage

    run(work())


def test_what_changes_nothing_is_taken(app: FastAPI) -> None:
    body = asking(
        user="me", metadata={"a": "b"}, store=False, service_tier="flex", n=1, seed=None,
        response_format={"type": "text"}, modalities=["text"], prompt_cache_key="x",
    )  # fmt: skip

    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.create(**body)
            assert done.choices[0].finish_reason == "stop"

    run(work())


def test_tokens_there_and_back(app: FastAPI, model: LoadedModel) -> None:
    from serving import http

    async def work() -> None:
        async with http(app) as client:
            found = (await client.post("/tokenize", json={"prompt": "Once upon"})).json()
            assert found["tokens"] == model.tokenizer.encode("Once upon")
            assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
            back = await client.post("/detokenize", json={"tokens": found["tokens"]})
            assert back.json() == {"prompt": "Once upon"}
            chat = (await client.post("/tokenize", json={"messages": QUESTION})).json()
            assert chat["tokens"] == model.tokenizer.chat_prompt(QUESTION)

    run(work())


def test_what_the_prefix_cache_had_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """And where the prompt differed, to the token; of an edit in the middle, too.  Once more each
    in the line that the log has of the response."""
    question = "Tell me of " + "numbers " * 60
    edited = question[:200] + "letters" + question[207:]

    async def work(app: FastAPI, tokens: Callable[[str], list[int]]) -> None:
        async with openai(app) as client:
            told = []
            for asked in (question, question, edited):
                body = asking(asked, max_tokens=2, stream=len(told) == 1)
                if len(told) != 1:
                    usage = (await client.chat.completions.create(**body)).usage
                else:
                    parts = await client.chat.completions.create(
                        **body, stream_options={"include_usage": True}
                    )
                    usage = [part async for part in parts][-1].usage
                details = usage.prompt_tokens_details
                told.append((usage.prompt_tokens, details.cached_tokens, details.diverged_at))
        prompt, same = len(tokens(question)), zip(tokens(question), tokens(edited), strict=False)
        border = [a == b for a, b in same].index(False)
        assert border % 16, "in the middle of a page"
        assert told == [
            (prompt, 0, 0),
            # Answers belong to the text, and only whole pages are kept.
            (prompt, (prompt - 1) // 16 * 16, min(prompt, (prompt + 1) // 16 * 16)),
            (len(tokens(edited)), border // 16 * 16, border),
        ]
        lines = [json.loads(line)["prompt"] for line in capsys.readouterr().err.splitlines()]
        named = ("tokens", "cached", "diverged_at")
        assert lines == [dict(zip(named, one, strict=True)) for one in told]

    with hmt.Engine(host_memory="64MiB", context=1024, prefix_cache=True) as engine:
        model = engine.load_model(embedded_model())

        def tokens(text: str) -> list[int]:
            return model.tokenizer.chat_prompt([{"role": "user", "content": text}])

        run(work(app_on(model, log_requests=True), tokens))


def test_without_a_prefix_cache_nothing_is_told_of_one(app: FastAPI) -> None:
    async def work() -> None:
        async with http(app) as client:
            done = (await client.post(CHAT, json=asking(max_tokens=1))).json()
        assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    run(work())


@pytest.mark.parametrize("shared", [False, True])
def test_no_key_is_told_of_what_another_asked(shared: bool) -> None:
    """In all three ways to ask for one prompt.  A salt keeps users of one key apart."""
    question = "Tell me of " + "numbers " * 30
    keys = KeyRing.of(["sk-alice-0123456789", "sk-bob-0123456789"])

    async def cached(app: FastAPI, key: str, **others: Any) -> list[int]:
        body = asking(question, max_tokens=1, **others)
        completion = {k: v for k, v in body.items() if k != "messages"} | {"prompt": question}
        async with http(app, authorization=f"Bearer {key}") as client:
            told = [
                (await client.post(path, json=asked)).json()["usage"]
                for path, asked in (
                    ("/v1/chat/completions", body),
                    ("/v1/completions", completion),
                    ("/v1/messages", body),
                )
            ]
        chat, text, message = told
        return [
            chat["prompt_tokens_details"]["cached_tokens"],
            text["prompt_tokens_details"]["cached_tokens"],
            message["cache_read_input_tokens"],
        ]

    async def work(app: FastAPI) -> None:
        first = await cached(app, "sk-alice-0123456789")
        assert first[:2] == [0, 0] and first[2] > 0, "a message has the prompt of a chat"
        again = await cached(app, "sk-alice-0123456789")
        assert min(again) > 0
        assert await cached(app, "sk-bob-0123456789") == (again if shared else first)
        assert await cached(app, "sk-bob-0123456789", cache_salt="user 1") == first
        assert await cached(app, "sk-bob-0123456789", cache_salt="user 1") == again
        assert (await cached(app, "sk-alice-0123456789", cache_salt="user 1")) == (
            again if shared else first
        )

    options = {"host_memory": "64MiB", "context": 2048, "prefix_shared": shared}
    with hmt.Engine(prefix_cache=True, **options) as engine:
        run(work(app_on(engine.load_model(embedded_model()), keys=keys)))
