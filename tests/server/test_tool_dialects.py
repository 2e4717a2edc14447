"""Calls in other models' ways through the server: free, forced, streamed; and schemas of tools."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from serving import CHAT, TEMPLATE, app_on, http, openai, run, saying

import hmt
from hmt.cli.options import embedded_model


class Leaf(BaseModel):
    """In `$defs`, and of itself."""

    kind: bool
    more: list["Leaf"] = []


class Root(BaseModel):
    one: Leaf
    other: Leaf | None = None


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]},
                                         "n": {"enum": [1, 2]}},
        "required": ["city", "n"], "additionalProperties": False}  # fmt: skip
ASK = {"model": "tools", "messages": [{"role": "user", "content": "What now?"}], "max_tokens": 300}
DEFINED = Root.model_json_schema()
OLDER = {"definitions": {"I": CITY}, "type": "object", "required": ["i"],
         "properties": {"i": {"$ref": "#/definitions/I"}},
         "additionalProperties": False}  # fmt: skip
ENDLESS = {"$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}},
                           "required": ["n"]}}, "$ref": "#/$defs/N"}  # fmt: skip
WAYS = {
    "coder": "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>",
    "llama": "[func_name1(params_name1=params_value1)]",
    "mistral": "[TOOL_CALLS]name[ARGS]",
}
SAID = {
    "coder": "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n"
             "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama": '[look(city="Rome", n=2)]',
    "mistral": '[TOOL_CALLS]look[ARGS]{"city": "Rome", "n": 2}',
}  # fmt: skip


@pytest.mark.each_once
@pytest.mark.parametrize("schema", [DEFINED, OLDER], ids=["$defs", "definitions"])
def test_schemas_of_tools_may_have_definitions(tooled: FastAPI, schema: dict[str, Any]) -> None:
    """Two tools whose definitions have one name and mean different things."""
    tools = [tool("first", schema), tool("second", {**ENDLESS, "$defs": {"N": CITY, "Leaf": CITY}})]

    async def work() -> None:
        async with openai(tooled) as client:
            for choice in ("required", {"type": "function", "function": {"name": "first"}}):
                done = await client.chat.completions.create(
                    **ASK, tools=tools, tool_choice=choice, temperature=0.7, seed=4, n=2,
                    logit_bias={},
                )  # fmt: skip
                for answer in done.choices:
                    (call,) = answer.message.tool_calls
                    if answer.finish_reason == "length":
                        continue
                    arguments = json.loads(call.function.arguments)
                    if call.function.name == "second":
                        assert arguments["city"] in ("Oslo", "Rome")
                    elif schema is DEFINED:
                        Root.model_validate(arguments)
                    else:
                        assert arguments["i"]["n"] in (1, 2)
        async with http(tooled) as client:
            body = {"model": "tools", "max_tokens": 300, "messages": ASK["messages"],
                    "tools": [{"name": "first", "input_schema": schema}],
                    "tool_choice": {"type": "any"}}  # fmt: skip
            assert (await client.post("/v1/messages", json=body)).status_code == 200

    run(work())


def test_what_no_answer_can_be_is_a_bad_request(tooled: FastAPI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}

    async def work() -> None:
        async with http(tooled) as client:
            for body, param in (
                ({"tools": [tool("f", ENDLESS)], "tool_choice": "required"}, "tools"),
                ({"response_format": form}, "response_format"),
                ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
            ):
                done = await client.post(CHAT, json={**ASK, **body})
                error = done.json()["error"]
                assert (done.status_code, error["param"]) == (400, param)
                assert "no answer can have" in error["message"]
            free = {"tools": [tool("f", ENDLESS)], "tool_choice": "auto"}
            assert (await client.post(CHAT, json={**ASK, **free})).status_code == 200

    run(work())


@pytest.fixture(scope="module", params=WAYS)
def spoken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FastAPI, Any, str]]:
    """A model whose template shows a way; Mistral's marks are special tokens, as in its own."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(embedded_model(), folder)
    template = TEMPLATE.replace("CALL", WAYS[request.param])
    if request.param == "mistral":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (folder / name).read_text(encoding="utf-8")
            text = text.replace("<|tool|>", "[TOOL_CALLS]").replace("<|image|>", "[ARGS]")
            (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with hmt.Engine(host_memory="64MiB", context=2048, max_batch=4) as engine:
        model = engine.load_model(folder)
        yield app_on(model), model.tokenizer, request.param


def test_calls_are_read_and_forced(spoken: tuple[FastAPI, Any, str]) -> None:
    app, tokenizer, way = spoken
    ids = [*tokenizer._encode(SAID[way], add_special_tokens=False), *tokenizer.eos_ids]
    if way == "mistral":
        assert set(tokenizer.call_marks) == {"[TOOL_CALLS]", "[ARGS]"}
        assert len(set(ids) & set(tokenizer.call_marks.values())) == 2
    tools = [tool("look", CITY), tool("leaf", DEFINED)]

    async def work() -> None:
        async with openai(app) as client:
            for choice in ("auto", "required"):
                ask: Any = {**ASK, "tools": tools, "tool_choice": choice, "temperature": 0}
                with saying(ids):  # which the form of a forced call allows
                    done = await client.chat.completions.create(**ask)
                    async with client.chat.completions.stream(**ask) as stream:
                        async for event in stream:
                            assert event.type != "content.delta" or event.delta == ""
                        streamed = await stream.get_final_completion()
                for answer in (done.choices[0], streamed.choices[0]):
                    (call,) = answer.message.tool_calls
                    assert answer.finish_reason == "tool_calls" and not answer.message.content
                    assert json.loads(call.function.arguments) == {"city": "Rome", "n": 2}
            with saying(ids):  # no tools are offered: marks that are special tokens are not shown
                done = await client.chat.completions.create(**ASK)
            said = done.choices[0].message.content
            assert "[TOOL_CALLS]" not in said and "look" in said

    run(work())


def test_a_call_that_is_forced_is_one(spoken: tuple[FastAPI, Any, str]) -> None:
    """Whatever chance says."""
    app, _, _ = spoken
    names = {"look", "leaf"}

    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.create(
                **ASK, tools=[tool("look", CITY), tool("leaf", DEFINED)], tool_choice="required",
                temperature=1.2, seed=2, n=4,
            )  # fmt: skip
        for answer in done.choices:
            if answer.finish_reason == "length":
                continue
            (call,) = answer.message.tool_calls
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            if call.function.name == "look":
                assert arguments["city"] in ("Oslo", "Rome") and arguments["n"] in (1, 2)
            else:
                Root.model_validate(arguments)

    run(work())


def test_long_arguments_come_in_pieces(spoken: tuple[FastAPI, Any, str]) -> None:
    app, tokenizer, way = spoken
    words = " ".join(f"word{n}" for n in range(30))
    text = {
        "coder": SAID["coder"].replace("Rome", words),
        "llama": f"[look({', '.join(f'a{n}={n}' for n in range(60))})]",
        "mistral": SAID["mistral"].replace("Rome", words),
    }[way]
    ids = [*tokenizer._encode(text, add_special_tokens=False), *tokenizer.eos_ids]
    free = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}

    async def work() -> None:
        with saying(ids):
            async with openai(app) as client:
                ask: Any = {**ASK, "tools": [tool("look", free)], "max_tokens": 600}
                whole = await client.chat.completions.create(**ask)
                stream = await client.chat.completions.create(**ask, stream=True)
                parts = [
                    one async for chunk in stream for one in chunk.choices[0].delta.tool_calls or []
                ]
            async with http(app) as client:
                body = {
                    "model": "tools",
                    "max_tokens": 600,
                    "messages": ASK["messages"],
                    "stream": True,
                    "tools": [{"name": "look", "input_schema": free}],
                }
                events = (await client.post("/v1/messages", json=body)).text
        assert len(parts) > 5 and [bool(one.id) for one in parts[:2]] == [True, False]
        assert {one.index for one in parts} == {0}
        said = "".join(one.function.arguments for one in parts)
        assert said == whole.choices[0].message.tool_calls[0].function.arguments
        lines = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data")]
        deltas = [one["delta"] for one in lines if one["type"] == "content_block_delta"]
        assert "".join(one["partial_json"] for one in deltas) == said
        starts = [one["content_block"] for one in lines if one["type"] == "content_block_start"]
        assert [(one["type"], one["name"], one["input"]) for one in starts] == [
            ("tool_use", "look", {})
        ]

    run(work())
