"""/v1/responses through OpenAI's client, with a model whose words are forced."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import Call, app_on, at_rest, http, run, saying, tooled_model
from test_tool_calls import CLOCK, WEATHER

import hmt
from hmt.server.errors import ApiError
from hmt.server.openai.output_parser import AnswerParser
from hmt.server.responses.items import AnyItem, chat_of, images_in

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
    going_on = forced("It rains.", tools=TOOLS, input=answer[-1:], previous_response_id=done["id"])
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
    ids=["any", "function", "custom", "allowed"],  # a set is written in any order
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


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """A server of a model whose template knows where reasoning ends."""
    folder = tmp_path_factory.mktemp("models") / NAME
    tooled_model(folder, "<tool_call>", "{% if 0 %}</think>{% endif %}")
    with hmt.Engine(host_memory="64MiB", context=1024, max_batch=4) as engine:
        yield app_on(engine.load_model(folder))


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item(thinks: FastAPI, summary: str | None) -> None:
    """As content or as a summary, and in a form that comes back unread."""
    tokenizer = thinks.state.service.model.tokenizer
    thought = "<think>\nHm, so.</think>\n\n" + called(thinks, "clock", "{}")
    asked = {**ASK, "tools": TOOLS, "include": ["reasoning.encrypted_content"],
             "reasoning": {"summary": summary}}  # fmt: skip
    with saying([*tokenizer.encode(thought), *tokenizer.eos_ids]):
        done = post(thinks, asked)
        events = streamed(thinks, asked)
    reasoning, call = done["output"]
    parts = reasoning["summary"] if summary else reasoning["content"]
    assert [part["text"] for part in parts] == ["Hm, so."]
    assert (reasoning["type"], call["type"]) == ("reasoning", "function_call")
    assert same(events[-1]["response"]["output"], done["output"])
    used = done["usage"]
    assert 3 < used["output_tokens_details"]["reasoning_tokens"] < used["output_tokens"]
    name = "response.reasoning_summary_text." if summary else "response.reasoning_text."
    deltas = [event["delta"] for event in events if event["type"] == f"{name}delta"]
    assert "".join(deltas) == "Hm, so." and len(deltas) > 1
    assert [event["text"] for event in events if event["type"] == f"{name}done"] == ["Hm, so."]
    unread = {name: reasoning[name] for name in ("type", "encrypted_content")} | {"summary": []}
    for back in (reasoning, unread):
        items = TypeAdapter(list[AnyItem]).validate_python([back, call])
        (message,) = chat_of(None, items)
        assert message["reasoning_content"] == "Hm, so." and len(message["tool_calls"]) == 1


def test_an_answer_that_was_cut_off_is_incomplete(tooled: FastAPI) -> None:
    body = forced("It is late in the evening.", max_output_tokens=2)
    done = post(tooled, body)
    assert done["status"] == done["output"][0]["status"] == "incomplete"
    assert done["incomplete_details"] == {"reason": "max_output_tokens"}
    last = streamed(tooled, body)[-1]
    assert last["type"] == "response.incomplete" and same(
        last["response"]["output"], done["output"]
    )


def test_a_form_and_log_probabilities(tooled: FastAPI) -> None:
    schema = {"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "time", "schema": schema, "strict": True}
    body = {**ASK, "text": {"format": form, "verbosity": "low"}, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"]}  # fmt: skip
    done = post(tooled, body)
    (part,) = done["output"][0]["content"]
    assert json.loads(part["text"])["hour"] in (1, 2)
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert done["text"]["format"] == form
    events = streamed(tooled, body)
    (text,) = [e["text"] for e in events if e["type"] == "response.output_text.done"]
    told = [
        one for e in events if e["type"] == "response.output_text.delta" for one in e["logprobs"]
    ]
    assert "".join(one["token"] for one in told) == text
    assert json.loads(text)["hour"] in (1, 2)
    loose = post(tooled, {**body, "text": {"format": {"type": "json_object"}}})
    assert loose["output"][0]["content"][0]["text"].startswith("{")


def test_a_failure_in_a_stream_is_its_last_event(
    tooled: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise ApiError(503, "no more room", kind="server_error")

    monkeypatch.setattr(AnswerParser, "read", fail)
    events = streamed(tooled, ASK)
    assert [event["type"] for event in events[2:]] == ["response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["output"] == []
    assert failed["error"] == {"code": "server_error", "message": "no more room"}
    assert at_rest(tooled.state.service.model)


def test_answers_end_when_the_client_goes(tooled: FastAPI) -> None:
    async def work() -> None:
        body = {**ASK, "stream": True, "max_output_tokens": 1500, "ignore_eos": True}
        call = Call(tooled, PATH, body)
        asked = asyncio.create_task(call.run())
        await call.wrote.wait()
        call.gone.set()
        await asked
        assert "response.completed" not in call.text

    run(work())
    assert at_rest(tooled.state.service.model)


def test_an_answer_without_a_limit_has_the_context(tooled: FastAPI) -> None:
    """Agents say none; a server that was told one keeps to it."""
    model = tooled.state.service.model
    endless = {name: ASK[name] for name in ("model", "input")} | {
        "ignore_eos": True, "logit_bias": {"1": -100}, "truncation": "auto", "top_p": 0,
    }  # fmt: skip
    assert post(tooled, endless)["usage"]["total_tokens"] == model.max_positions
    told = post(app_on(model, name=NAME, default_new_tokens=3), endless)
    assert told["usage"]["output_tokens"] == 3 and told["truncation"] == "disabled"


def chat(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return chat_of(instructions, TypeAdapter(list[AnyItem]).validate_python(list(items)))


def test_items_become_a_chat() -> None:
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    begins = {"type": "message", "role": "developer", "content": "Be brief."}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    other = {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    text = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}]}  # fmt: skip
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    system, asked, answer, output, later = chat(
        begins, user, reasoning, text, call, searched, other, result, text, instructions="Help."
    )
    assert system == {"role": "system", "content": "Help.\n\nBe brief."}
    assert asked == {"role": "user", "content": "Hi"}
    assert (answer["content"], answer["reasoning_content"]) == ("So.", "Hm.")
    assert [(one["id"], one["function"]) for one in answer["tool_calls"]] == [
        ("c", {"name": "f", "arguments": {"a": 1}}),
        ("d", {"name": "p", "arguments": {"input": "x"}}),
    ]
    assert output == {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert later == {"role": "assistant", "content": "So."}
    assert [one["content"] for one in chat(text, text)] == ["So.", "So."]
    foreign = reasoning | {"content": None, "encrypted_content": "gAAAAA"}
    assert chat(foreign, text)[0]["reasoning_content"] == ""
    assert [one["role"] for one in chat(user, begins)] == ["user", "system"]


def test_images_of_results_come_after_them() -> None:
    url = "data:image/png;base64,AAAA"
    image = {"type": "input_image", "detail": "auto", "image_url": url}
    results = [
        {"type": "function_call_output", "call_id": name,
         "output": [{"type": "input_text", "text": name}, image]}
        for name in ("a", "b")
    ]  # fmt: skip
    user = {"role": "user", "content": [image, {"type": "input_text", "text": "?"}]}
    items = TypeAdapter(list[AnyItem]).validate_python([*results, user])
    messages = chat_of(None, items)
    assert [(one["role"], one["content"]) for one in messages] == [
        ("tool", "a"), ("tool", "b"),
        ("user", [{"type": "image"}] * 2),
        ("user", [{"type": "image"}, {"type": "text", "text": "?"}]),
    ]  # fmt: skip
    assert images_in(items) == [base64.b64decode("AAAA")] * 3
