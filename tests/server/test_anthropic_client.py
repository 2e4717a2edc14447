"""Anthropic's own client against the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from fastapi import FastAPI
from serving import NAME, app_on, http, run, saying

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.server import KeyRing

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY: dict[str, Any] = {"model": NAME, "max_tokens": 64, "extra_body": {"temperature": 0}}

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


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


def test_what_the_prefix_cache_had_is_told() -> None:
    """And where the prompt differed, to the token: of an edit in the middle, too."""
    question = "Tell me of " + "numbers " * 60
    edited = question[:200] + "letters" + question[207:]

    async def work(model: LoadedModel) -> None:
        async with client_of(app_on(model)) as client:
            told = []
            for asked, stream in (
                (question, True), (question, False), (question, True), (edited, False),
            ):  # fmt: skip
                body = GREEDY | {"messages": [{"role": "user", "content": asked}], "max_tokens": 2}
                if stream:
                    async with client.messages.stream(**body) as events:
                        deltas = [e async for e in events if e.type == "message_delta"]
                    usage = deltas[-1].usage
                else:
                    usage = (await client.messages.create(**body)).usage
                told.append((usage.input_tokens, usage.cache_read_input_tokens, usage.diverged_at))
        first, second = (
            model.tokenizer.chat_prompt([{"role": "user", "content": text}])
            for text in (question, edited)
        )
        border = [a == b for a, b in zip(first, second, strict=False)].index(False)
        held, prompt = (len(first) - 1) // 16 * 16, len(first)
        again = (prompt - held, held, min(prompt, (prompt + 1) // 16 * 16))
        page = border // 16 * 16
        assert border != page, "in the middle of a page"
        assert told == [(prompt, 0, 0), again, again, (len(second) - page, page, border)]

    with hmt.Engine(host_memory="64MiB", context=1024, prefix_cache=True) as engine:
        run(work(engine.load_model(embedded_model())))


def test_without_a_prefix_cache_nothing_is_told_of_one(app: FastAPI) -> None:
    async def work() -> None:
        async with client_of(app) as client:
            done = await client.messages.create(**GREEDY, messages=QUESTION)
        assert done.usage.cache_read_input_tokens == 0 and not done.usage.model_extra

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
            with pytest.raises(anthropic.BadRequestError, match="no place for tools"):
                await client.messages.create(**GREEDY, messages=QUESTION, tools=[WEATHER])
            for wrong_ in (
                {"tools": [WEATHER, WEATHER]},
                {"tool_choice": {"type": "any"}},
                {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}},
                {"tools": [{**WEATHER, "type": "web_search_20250305"}]},
                {"thinking": {"type": "enabled", "budget_tokens": -1}},
                {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a",
                                                            "name": "b", "input": {}}]}]},
            ):  # fmt: skip
                with pytest.raises(anthropic.BadRequestError, match=next(reversed(wrong_))):
                    await client.messages.create(**GREEDY | {"messages": QUESTION, **wrong_})
            with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.input'"):
                call = {"type": "tool_use", "id": "a", "name": "b", "input": 3}
                await client.messages.create(
                    **GREEDY, messages=[{"role": "assistant", "content": [call]}]
                )
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
    from hmt.engine.outputs.output_processor import OutputProcessor

    def faulty(*given: Any) -> None:
        raise DiskReadError("the disk said no")

    monkeypatch.setattr(OutputProcessor, "accept", faulty)

    async def work() -> None:
        async with client_of(app) as client:
            with pytest.raises(anthropic.APIStatusError, match="the disk said no"):
                async with client.messages.stream(**GREEDY, messages=QUESTION) as events:
                    await events.get_final_message()

    run(work())


def test_tools_are_called_and_answered(tooled: FastAPI) -> None:
    asked: dict[str, Any] = {"model": "tools", "max_tokens": 200, "messages": QUESTION,
                             "tools": [WEATHER]}  # fmt: skip

    async def work() -> None:
        async with client_of(tooled) as client:
            for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
                done = await client.messages.create(**asked, tool_choice=choice)
                async with client.messages.stream(**asked, tool_choice=choice) as events:
                    streamed = await events.get_final_message()
                for message in (done, streamed):
                    (block,) = message.content
                    assert (block.type, block.name) == ("tool_use", "weather")
                    assert block.input["city"] in ("Oslo", "Rome")
                    assert message.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
            more = [result, {"type": "text", "text": "And?"}]
            said = {"role": "assistant", "content": done.content}
            back = [*QUESTION, said, {"role": "user", "content": more}]
            counted = await client.messages.count_tokens(
                model="tools", messages=back, tools=[WEATHER]
            )
            after = await client.messages.create(**asked | {"messages": back, "max_tokens": 4})
        tokenizer = tooled.state.service.model.tokenizer
        call = done.content[0]
        function = {"name": "weather", "arguments": call.input}
        plain = [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": block.id, "content": "Rain."},
            {"role": "user", "content": "And?"},
        ]  # fmt: skip
        schema = WEATHER["input_schema"]
        offered = {"name": "weather", "description": "Tells the weather.", "parameters": schema}
        wanted = tokenizer.chat_prompt(plain, [{"type": "function", "function": offered}])
        assert after.usage.input_tokens == counted.input_tokens == len(wanted)

    run(work())


def test_thinking_is_a_block_of_its_own(tooled: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tooled.state.service.model.tokenizer
    source = tokenizer._template_source + "{% if 0 %}</think>{% endif %}"
    monkeypatch.setattr(tokenizer, "_template_source", source)
    asked: dict[str, Any] = {"model": "tools", "max_tokens": 60, "messages": QUESTION}
    ids = [*tokenizer.encode("<think>Hm, so.</think>\n\nIt is 42."), *tokenizer.eos_ids]

    async def work() -> None:
        async with client_of(tooled) as client:
            with saying(ids):
                done = await client.messages.create(**asked)
                async with client.messages.stream(**asked) as events:
                    streamed = await events.get_final_message()
            for message in (done, streamed):
                thought, answer = message.content
                assert (thought.type, thought.thinking) == ("thinking", "Hm, so.")
                assert (answer.type, answer.text) == ("text", "It is 42.")
                assert message.stop_reason == "end_turn"
            with saying(ids, unless_forced=True):
                less = await client.messages.create(**asked, thinking={"type": "disabled"})
            assert all(block.type == "text" or len(block.thinking) < 6 for block in less.content)
            back = [*QUESTION, {"role": "assistant", "content": done.content}, *QUESTION]
            assert (await client.messages.create(**asked | {"messages": back})).content

    run(work())
