"""Anthropic's own client against the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from fastapi import FastAPI
from serving import NAME, app_on, http, run

import hmt
from hmt.engine import LoadedModel
from hmt.server import KeyRing

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY: dict[str, Any] = {"model": NAME, "max_tokens": 64, "extra_body": {"temperature": 0}}


@asynccontextmanager
async def client_of(app: FastAPI, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with http(app) as client:
        yield anthropic.AsyncAnthropic(
            api_key=key, base_url="http://localhost", http_client=client, max_retries=0
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_answered(app: FastAPI, model: LoadedModel, stream: bool) -> None:
    ids = model.tokenizer.chat_prompt(QUESTION)
    wanted = model.infer(hmt.Request(ids, 64))

    async def work() -> None:
        async with client_of(app) as client:
            if stream:
                async with client.messages.stream(**GREEDY, messages=QUESTION) as events:
                    texts = [text async for text in events.text_stream]
                    done = await events.get_final_message()
                assert "".join(texts) == wanted.text and len(texts) > 1
            else:
                done = await client.messages.create(**GREEDY, messages=QUESTION)
            counted = await client.messages.count_tokens(model=NAME, messages=QUESTION)
        assert (done.role, done.type, done.model) == ("assistant", "message", NAME)
        assert [block.text for block in done.content] == [wanted.text]
        assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
        assert done.usage.input_tokens == counted.input_tokens == len(ids)
        assert done.usage.output_tokens == len(wanted.token_ids)

    run(work())


def test_it_is_the_same_path_as_openais(app: FastAPI, model: LoadedModel) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *QUESTION]
    ids = model.tokenizer.chat_prompt(chat)
    wanted = model.infer(hmt.Request(ids, 64)).text

    async def work() -> None:
        async with client_of(app) as client:
            done = await client.messages.create(
                **GREEDY,
                system=[{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "brief."}],
                messages=[{"role": "user", "content": [{"type": "text", "text": "What is 12"},
                                                       {"type": "text", "text": " + 30?"}]}],
            )  # fmt: skip
        assert done.content[0].text == wanted and done.usage.input_tokens == len(ids)

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(app: FastAPI, model: LoadedModel, stream: bool) -> None:
    ids = model.tokenizer.chat_prompt(QUESTION)
    text = model.infer(hmt.Request(ids, 64)).text

    async def reason(client: anthropic.AsyncAnthropic, **others: Any) -> Any:
        options = {**GREEDY, "messages": QUESTION, **others}
        if not stream:
            return await client.messages.create(**options)
        async with client.messages.stream(**options) as events:
            return await events.get_final_message()

    async def work() -> None:
        async with client_of(app) as client:
            cut = await reason(client, max_tokens=1)
            assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
            stop = text[1]
            stopped = await reason(client, stop_sequences=["nowhere", stop])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
            assert stopped.content[0].text == text[: text.index(stop)] if text[0] != stop else True

    run(work())


def test_errors_have_anthropics_form(app: FastAPI, model: LoadedModel) -> None:
    locked = app_on(model, keys=KeyRing.of(["sk-correct-horse"]))

    async def work() -> None:
        async with client_of(app) as client:
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.messages.create(
                    **GREEDY | {"extra_body": {"temperature": 3}}, messages=QUESTION
                )
            assert bad.value.body["error"]["type"] == "invalid_request_error"
            assert "temperature" in bad.value.body["error"]["message"]
            with pytest.raises(anthropic.BadRequestError, match="messages"):
                await client.messages.create(**GREEDY | {"max_tokens": 9000}, messages=QUESTION)
            with pytest.raises(anthropic.BadRequestError, match="tools"):
                await client.messages.create(**GREEDY, messages=QUESTION, tools=[])
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**GREEDY | {"model": "other"}, messages=QUESTION)
        async with client_of(locked, "sk-wrong-and-long") as client:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await client.messages.create(**GREEDY, messages=QUESTION)
            assert wrong.value.body["error"]["type"] == "authentication_error"
        async with client_of(locked, "sk-correct-horse") as client:
            assert (await client.messages.create(**GREEDY, messages=QUESTION)).content

    run(work())


def test_an_error_within_a_stream_is_one(
    app: FastAPI, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hmt.base.errors import DiskReadError
    from hmt.engine import core

    monkeypatch.setattr(
        core, "_accept", lambda one, *_: one.fail(DiskReadError("the drive said no"))
    )

    async def work() -> None:
        async with client_of(app) as client:
            with pytest.raises(anthropic.APIStatusError, match="the drive said no"):
                async with client.messages.stream(**GREEDY, messages=QUESTION) as events:
                    await events.get_final_message()

    run(work())
