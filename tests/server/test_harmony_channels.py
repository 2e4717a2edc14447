"""gpt-oss's channels through the server: what is thought, said and called, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from harmony_model import harmony_folder
from serving import CHAT, app_on, asking, http, openai, run, saying

import hmt

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SAID = "<|channel|>final<|message|>It is late."
CALL = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}'
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip
ASK = {"model": "model", "messages": [{"role": "user", "content": "What time is it?"}],
       "tools": [CLOCK], "max_tokens": 120}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    folder = harmony_folder(tmp_path_factory.mktemp("harmony") / "model")
    with hmt.Engine(host_memory="64MiB", context=1024, max_batch=4) as engine:
        yield app_on(engine.load_model(folder))


def tokens(app: FastAPI, text: str) -> list[int]:
    return list(app.state.service.model.tokenizer.encode(text))


@pytest.mark.parametrize("end", ["return", "call"])
def test_an_answer_in_parts(served: FastAPI, end: str) -> None:
    text = THOUGHT + (SAID if end == "return" else CALL) + f"<|{end}|>"

    async def work() -> None:
        with saying(tokens(served, text)):
            async with openai(served) as client:
                done = await client.chat.completions.create(**ASK)
                stream = await client.chat.completions.create(**ASK, stream=True)
                chunks = [chunk.choices[0] async for chunk in stream]
        message, parts = done.choices[0].message, [chunk.delta for chunk in chunks]
        thought = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
        assert message.reasoning_content == thought == "Hm."
        calls = [call for part in parts for call in part.tool_calls or []]
        assert (message.content or "") == "".join(part.content or "" for part in parts)
        if end == "return":
            assert message.content == "It is late." and not message.tool_calls and not calls
            assert done.choices[0].finish_reason == chunks[-1].finish_reason == "stop"
        else:
            assert message.content is None
            for one in (*message.tool_calls, *calls):
                assert one.function.name == "clock"
                assert json.loads(one.function.arguments) == {"zone": "UTC"}
            assert len(message.tool_calls) == len(calls) == 1
            assert done.choices[0].finish_reason == chunks[-1].finish_reason == "tool_calls"

    run(work())


def test_anthropics_blocks(served: FastAPI) -> None:
    tool = {"name": "clock", "input_schema": CLOCK["function"]["parameters"]}
    body = {"model": "model", "messages": ASK["messages"], "max_tokens": 60, "tools": [tool]}

    async def work() -> None:
        with saying(tokens(served, THOUGHT + CALL + "<|call|>")):
            async with http(served) as client:
                done = (await client.post("/v1/messages", json=body)).json()
        thought, call = done["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "clock", {"zone": "UTC"})
        assert done["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "late"}
        chat = [*ASK["messages"], {"role": "assistant", "content": [thought, call]},
                {"role": "user", "content": [result]}]  # fmt: skip
        async with http(served) as client:
            counted = await client.post(
                "/v1/messages/count_tokens", json={"model": "model", "messages": chat}
            )
            chat[1]["content"] = [call]
            less = await client.post(
                "/v1/messages/count_tokens", json={"model": "model", "messages": chat}
            )
        kept = tokens(served, "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>")
        assert counted.json()["input_tokens"] == less.json()["input_tokens"] + len(kept)

    run(work())


def test_forms_and_limits(served: FastAPI) -> None:
    """What the model says freely is nonsense: only what it is held to can come out."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    async def ask(client: Any, **others: Any) -> Any:
        done = (await client.post(CHAT, json=ASK | {"temperature": 0} | others)).json()
        return done["choices"][0]["message"], done["usage"]["prompt_tokens"]

    async def work() -> None:
        async with http(served) as client:
            called, free = await ask(client, tool_choice="required")
            (call,) = called["tool_calls"]
            assert call["function"]["name"] == "clock" and called["content"] is None
            assert json.loads(call["function"]["arguments"])["zone"] in ("CET", "UTC")
            formed, longer = await ask(client, response_format=form)
            assert json.loads(formed["content"])["n"] in (1, 2)
            # It begins where the final message has begun.
            assert longer == free + len(tokens(served, "<|channel|>final<|message|>"))
            begun = tokens(served, "<|channel|>analysis<|message|>This takes its time")
            with saying([*begun, *tokens(served, " and more") * 40], unless_forced=True):
                cut, _ = await ask(client, thinking_token_budget=3, max_tokens=40)
            assert len(tokens(served, cut["reasoning_content"])) <= 4
            assert "more" in cut["content"] and "<|" not in cut["content"]

    run(work())


def test_effort_and_what_was_thought_before(served: FastAPI, app: FastAPI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "late"}
    tokenizer = served.state.service.model.tokenizer

    async def work() -> None:
        async with http(served) as client:
            body = ASK | {"messages": [*ASK["messages"], asked, result], "max_tokens": 1,
                          "reasoning_effort": "high"}  # fmt: skip
            done = (await client.post(CHAT, json=body)).json()
            plain = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [
                call | {"function": {"name": "clock", "arguments": {}}}]}  # fmt: skip
            wanted = tokenizer.chat_prompt(
                [*ASK["messages"], plain, result], [CLOCK], variables={"reasoning_effort": "high"}
            )
            assert done["usage"]["prompt_tokens"] == len(wanted)
            written = tokenizer.decode(wanted)
            assert "Effort: high" in written and "analysis<|message|>Hm.<|end|>" in written
        async with http(app) as client:  # whose template has no place for it
            plain_answer = (await client.post(CHAT, json=asking())).json()
            taken = await client.post(CHAT, json=asking(reasoning_effort="low"))
            assert taken.status_code == 200
            assert taken.json()["choices"] == plain_answer["choices"]

    run(work())
