"""/v1/responses through OpenAI's client, with a model whose words are forced."""

import base64
import json
from typing import Any

import pytest
from fastapi import FastAPI
from openai import BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import Call, app_on, at_rest, http, openai, run, saying
from test_tool_calls import CLOCK, WEATHER

from hmt.engine import LoadedModel
from hmt.server.responses.store import ResponseStore, StoredResponse

PATH = "/v1/responses"
NAME = "tools"
TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
PATCH = {"type": "custom", "name": "patch", "description": "Takes a patch.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
AGENTS = {"type": "namespace", "name": "agents", "description": "More agents.",
          "tools": [{"type": "function", "name": "clock", "parameters": None}]}  # fmt: skip
ASK: dict[str, Any] = {"model": NAME, "input": "What is the weather?", "max_output_tokens": 200}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def forced(text: str, **others: Any) -> dict[str, Any]:
    """A request that is answered by `text`."""
    return {**ASK, "structured_outputs": {"choice": [text]}, **others}


def called(app: FastAPI, name: str, arguments: str) -> str:
    """A call as the app's model writes it."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    tagged = app.state.service.model.tokenizer.tool_style.tagged
    return f"<tool_call>\n{call}\n</tool_call>" if tagged else call


def post(app: FastAPI, body: Any) -> Any:
    async def work() -> Any:
        async with http(app) as client:
            done = await client.post(PATH, json=body)
        assert done.status_code == 200, done.text
        return done.json()

    return run(work())


def streamed(app: FastAPI, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each as its official type has it."""

    async def work() -> str:
        async with http(app) as client:
            done = await client.post(PATH, json={**body, "stream": True})
        assert done.status_code == 200, done.text
        assert done.headers["content-type"].startswith("text/event-stream")
        return done.text

    events = []
    for block in run(work()).strip().split("\n\n"):
        first, second = block.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def same(left: Any, right: Any) -> bool:
    """Whether two outputs differ by ids alone."""

    def bare(items: Any) -> Any:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    return bool(bare(left) == bare(right))


def test_text_and_its_events(tooled: FastAPI) -> None:
    body = forced("It is late.")
    done = post(tooled, body)
    assert Response.model_validate(done).output_text == "It is late."
    assert (done["status"], done["error"], done["incomplete_details"]) == ("completed", None, None)
    used = done["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    events = streamed(tooled, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert deltas > 1
    assert "".join(event.get("delta", "") for event in events) == "It is late."
    last = events[-1]["response"]
    assert same(last["output"], done["output"]) and last["usage"] == used
    assert events[0]["response"]["output"] == []


def test_a_call_and_its_result(tooled: FastAPI) -> None:
    arguments = '{"city": "Oslo", "days": 2}'
    body = forced(called(tooled, "weather", arguments), tools=TOOLS, tool_choice="auto")
    done = post(tooled, body)
    (call,) = Response.model_validate(done).output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments) == json.loads(arguments)
    events = streamed(tooled, body)
    assert same(events[-1]["response"]["output"], done["output"])
    parts = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(parts)) == json.loads(arguments)
    answer = [
        {"role": "user", "content": ASK["input"]},
        *done["output"],
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
    ]
    tokenizer = tooled.state.service.model.tokenizer
    wanted = tokenizer.chat_prompt(
        [
            {"role": "user", "content": ASK["input"]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": call.call_id, "type": "function",
                 "function": {"name": "weather", "arguments": json.loads(arguments)}}]},
            {"role": "tool", "content": "Rain.", "tool_call_id": call.call_id},
        ],
        [WEATHER, CLOCK],
    )  # fmt: skip
    whole = post(tooled, forced("It rains.", tools=TOOLS, input=answer))
    assert whole["usage"]["input_tokens"] == len(wanted)
    going_on = forced(
        "It rains.", tools=TOOLS, input=answer[-1:], previous_response_id=done["id"]
    )
    later = post(tooled, going_on)
    assert later["usage"]["input_tokens"] == len(wanted)
    referred = [answer[0], {"type": "item_reference", "id": call.id}, answer[-1]]
    again = post(tooled, forced("It rains.", tools=TOOLS, input=referred, store=False))
    assert again["usage"]["input_tokens"] == len(wanted)
    events = streamed(tooled, going_on | {"previous_response_id": later["id"], "input": "And?"})
    assert events[-1]["response"]["previous_response_id"] == later["id"]
    assert events[-1]["response"]["usage"]["input_tokens"] > len(wanted)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock", "patch", "agents__clock"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        ({"type": "custom", "name": "patch"}, {"patch"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "clock"}]}, {"clock"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_can_be_demanded(tooled: FastAPI, choice: Any, names: set[str]) -> None:
    tools = [*TOOLS, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]
    body = {**ASK, "tools": tools, "tool_choice": choice, "temperature": 1.5, "seed": 3}
    done = post(tooled, body)
    (call,) = done["output"]
    name = "__".join(filter(None, (call.get("namespace"), call["name"])))
    assert name in names
    custom = call["name"] == "patch"
    assert call["type"] == ("custom_tool_call" if custom else "function_call")
    events = streamed(tooled, body)
    assert same(events[-1]["response"]["output"], done["output"])


def test_a_custom_tool_takes_text(tooled: FastAPI) -> None:
    said = called(tooled, "patch", json.dumps({"input": 'a "b"\nc'}))
    body = forced(said, tools=[PATCH], tool_choice="auto")
    events = streamed(tooled, body)
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a "b"\nc')
    assert "response.custom_tool_call_input.done" in [event["type"] for event in events]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    chat = post(tooled, forced("Fine.", tools=[PATCH], input=[call, result]))
    assert chat["output"][0]["content"][0]["text"] == "Fine."


def test_reasoning_is_an_item(tooled: FastAPI) -> None:
    """As content, as a summary, and in a form that comes back unread."""
    model = tooled.state.service.model
    tokenizer = model.tokenizer
    template = tokenizer.chat_template if hasattr(tokenizer, "chat_template") else None
    del template
    for summary in (None, "auto"):
        with saying([*tokenizer.encode("<think>Hm, so.</think>It is late."), *tokenizer.eos_ids]):
            body = {**ASK, "include": ["reasoning.encrypted_content"],
                    "reasoning": {"summary": summary}}  # fmt: skip
            done = post(tooled, body)
            events = streamed(tooled, body)
        print(done["output"], [e["type"] for e in events])
