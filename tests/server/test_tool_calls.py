"""Tools through OpenAI's client.

With a model whose template knows them, and whose weights do not: what it says is forced.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from serving import CHAT, TEMPLATE, app_on, http, openai, run, saying

import hmt
from hmt.cli.options import embedded_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}  # fmt: skip
ASK = {"model": "tools", "messages": [{"role": "user", "content": "What is the weather?"}],
       "tools": [WEATHER, CLOCK], "max_tokens": 200}  # fmt: skip


def check(call: Any, names: tuple[str, ...]) -> None:
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)
    else:
        assert arguments == {}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ("weather", "clock")),
        ({"type": "function", "function": {"name": "weather"}}, ("weather",)),
    ],
    ids=str,
)
def test_a_call_can_be_demanded(tooled: FastAPI, choice: Any, names: tuple[str, ...]) -> None:
    async def work() -> None:
        async with openai(tooled) as client:
            options = {**ASK, "tool_choice": choice, "temperature": 1.5, "seed": 3}
            done = await client.chat.completions.create(**options, n=3)
            for answer in done.choices:
                assert answer.finish_reason == "tool_calls" and answer.message.content is None
                (call,) = answer.message.tool_calls
                check(call, names)
            stream = await client.chat.completions.create(**options, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            (call,) = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
            assert call.index == 0 and chunks[-1].finish_reason == "tool_calls"
            check(call, names)
            first = done.choices[0].message.tool_calls[0].function
            assert (call.function.name, call.function.arguments) == (first.name, first.arguments)
            assert not any(chunk.delta.content for chunk in chunks)

    run(work())


def test_a_call_is_read_where_it_was_free_to_speak(tooled: FastAPI) -> None:
    style = tooled.state.service.model.tokenizer.tool_style
    call = '{"name": "clock", "arguments": {}}'
    said = f"<tool_call>\n{call}\n</tool_call>" if style.tagged else call

    async def work() -> None:
        async with openai(tooled) as client:
            for stream in (False, True):
                done = await client.chat.completions.create(
                    **ASK, tool_choice="auto", stream=stream,
                    extra_body={"structured_outputs": {"choice": [said]}},
                )  # fmt: skip
                if stream:
                    chunks = [chunk.choices[0] async for chunk in done]
                    calls = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
                    assert chunks[-1].finish_reason == "tool_calls"
                else:
                    calls = done.choices[0].message.tool_calls
                assert [one.function.name for one in calls] == ["clock"]

    run(work())


def test_one_call_where_several_are_not_wanted(tooled: FastAPI) -> None:
    style = tooled.state.service.model.tokenizer.tool_style
    calls = [f'{{"name": "{name}", "arguments": {{}}}}' for name in ("clock", "weather")]
    said = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    said = said if style.tagged else f"[{', '.join(calls)}]"

    async def work() -> None:
        async with openai(tooled) as client:
            for several in (True, False):
                ask = {**ASK, "parallel_tool_calls": several,
                       "extra_body": {"structured_outputs": {"choice": [said]}}}  # fmt: skip
                done = await client.chat.completions.create(**ask)
                stream = await client.chat.completions.create(**ask, stream=True)
                chunks = [chunk.choices[0] async for chunk in stream]
                names = [call.function.name for call in done.choices[0].message.tool_calls]
                parts = [call.function.name for c in chunks for call in c.delta.tool_calls or []]
                assert names == parts == (["clock", "weather"] if several else ["clock"])
                assert done.choices[0].finish_reason == chunks[-1].finish_reason == "tool_calls"
                assert not done.choices[0].message.content

    run(work())


def test_text_stays_text(tooled: FastAPI) -> None:
    async def work() -> None:
        async with openai(tooled) as client:
            for choice in ("auto", "none"):
                done = await client.chat.completions.create(
                    **ASK, tool_choice=choice,
                    extra_body={"structured_outputs": {"choice": ["It is {late}."]}},
                )  # fmt: skip
                answer = done.choices[0]
                assert answer.message.content == "It is {late}."
                assert answer.message.tool_calls is None and answer.finish_reason == "stop"

    run(work())


def test_calls_and_results_go_back_into_the_chat(tooled: FastAPI) -> None:
    tokenizer = tooled.state.service.model.tokenizer
    function = {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    plain = [
        ASK["messages"][0],
        {"role": "assistant", "content": "", "tool_calls": [
            {**call, "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}}]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_1"},
    ]  # fmt: skip
    wanted = tokenizer.chat_prompt(plain, [WEATHER, CLOCK])
    assert "Oslo" in tokenizer.decode(wanted) and "Tells the weather" in tokenizer.decode(wanted)

    async def work() -> None:
        async with openai(tooled) as client:
            done = await client.chat.completions.create(**ASK | {"messages": messages})
        assert done.usage.prompt_tokens == len(wanted)

    run(work())


def test_reasoning_comes_apart(tmp_path: Path) -> None:
    """Before a call, too."""
    folder = tmp_path / "tools"
    shutil.copytree(embedded_model(), folder)
    template = TEMPLATE.replace("CALL", "<tool_call>") + "{% if 0 %}</think>{% endif %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'

    async def work(app: FastAPI, tokenizer: Any) -> None:
        for text in ("<think>\nHm.</think>\n\nIt is late.", f"<think>Hm.</think>{call}"):
            with saying([*tokenizer.encode(text), *tokenizer.eos_ids]):
                async with openai(app) as client:
                    done = await client.chat.completions.create(**ASK)
                    stream = await client.chat.completions.create(**ASK, stream=True)
                    parts = [chunk.choices[0].delta async for chunk in stream]
            message = done.choices[0].message
            thought = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
            assert message.reasoning_content == thought == "Hm."
            said = "".join(part.content or "" for part in parts)
            assert said == (message.content or "")
            if call in text:
                assert message.tool_calls[0].function.name == "clock" and message.content is None
                assert sum(len(part.tool_calls or []) for part in parts) == 1
            else:
                assert said == "It is late." and message.tool_calls is None

    async def think_no_longer(app: FastAPI, tokenizer: Any) -> None:
        thought = tokenizer.encode("<think>This takes its time and more")
        for most in (0, 3):
            body = {"model": "tools", "messages": ASK["messages"], "max_tokens": 40,
                    "thinking_token_budget": most, "temperature": 0}  # fmt: skip
            with saying([*thought, *tokenizer.encode(" and more") * 40], unless_forced=True):
                async with http(app) as client:
                    done = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
            kept = tokenizer.encode(done.get("reasoning_content", ""))
            assert len(kept) <= most + 1 and done["content"].startswith("and more")
            assert "think" not in done["content"]

    with hmt.Engine(host_memory="64MiB", context=1024) as engine:
        model = engine.load_model(folder)
        run(work(app_on(model), model.tokenizer))
        run(think_no_longer(app_on(model), model.tokenizer))
