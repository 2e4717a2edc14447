"""A table of bad requests: each gets its status, and a body that says what is wrong and where."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from serving import CHAT, NAME, app_on, asking, at_rest, http, run

from hmt.engine import LoadedModel

TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
ITEMS = "/v1/responses"
TOOL = {"type": "function", "function": {"name": "a"}}
MESSAGE = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGE, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "Hi", **fields}


def embed(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": "Hi", **fields}


def items(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": list(given) or "Hi", **fields}


def said(content: Any, role: Any = "user", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": role, "content": content, **fields}]}


# (path, body, param, code): all of status 400, type invalid_request_error
TABLE: list[tuple[str, Any, str | None, str]] = [
    # Bodies that are none.
    (CHAT, b"", None, "invalid_type"),
    (CHAT, b"{", None, "invalid_json"),
    (CHAT, b"\xff\xfe", None, "invalid_json"),
    (CHAT, b'{"model": "mini-dense", "messages": [}', None, "invalid_json"),
    (CHAT, b"[" * 100_000, None, "invalid_json"),
    (CHAT, b'{"model": ' + b"9" * 5000 + b"}", None, "invalid_json"),
    (CHAT, [], None, "invalid_type"),
    (CHAT, "text", None, "invalid_type"),
    (CHAT, None, None, "invalid_type"),
    # Models.
    (CHAT, {"messages": MESSAGE}, "model", "missing_required_parameter"),
    (CHAT, chat(model=3), "model", "invalid_type"),
    (CHAT, chat(model=None), "model", "invalid_type"),
    # Messages.
    (CHAT, {"model": NAME}, "messages", "missing_required_parameter"),
    (CHAT, chat(messages=[]), "messages", "invalid_value"),
    (CHAT, chat(messages="Hi"), "messages", "invalid_type"),
    (CHAT, chat(messages=["Hi"]), "messages[0]", "invalid_type"),
    (CHAT, chat(messages=[{"content": "Hi"}]), "messages[0].role", "missing_required_parameter"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "invalid_value"),
    (CHAT, chat(messages=[*MESSAGE, {"role": "user", "content": 1}]), "messages[1].content",
     "invalid_type"),
    (CHAT, said("Hi", role="robot"), "messages[0].role", "invalid_value"),
    (CHAT, said("Hi", role=None), "messages[0].role", "invalid_value"),
    (CHAT, said(None), "messages[0].content", "invalid_value"),
    (CHAT, said([]), "messages[0].content", "invalid_value"),
    (CHAT, said(["Hi"]), "messages[0].content[0]", "invalid_type"),
    (CHAT, said([{"type": "text"}]), "messages[0].content[0].text", "missing_required_parameter"),
    (CHAT, said([{"type": "text", "text": 1}]), "messages[0].content[0].text", "invalid_type"),
    (CHAT, said([{"type": "image_url", "image_url": {"url": "x"}}]),
     "messages[0].content[0].image_url", "invalid_value"),
    (CHAT, said("Hi", tool_calls=[{"id": "a", "type": "function",
                                   "function": {"name": "a", "arguments": "{}"}}]),
     "messages[0].tool_calls", "invalid_value"),
    (CHAT, said("Hi", tool_cals=[1]), "messages[0].tool_cals", "unknown_parameter"),
    (CHAT, said("Hi", prefix=True), "messages[0].prefix", "unsupported"),
    (CHAT, b'{"model": "mini-dense", "messages": [{"role": "user", "content": "\\ud800"}]}',
     "messages", "invalid_value"),
    # What is not known, or cannot be served.
    (CHAT, chat(temprature=1), "temprature", "unknown_parameter"),
    (CHAT, chat(prompt="Hi"), "prompt", "unsupported"),
    (CHAT, chat(tools=[TOOL]), "tools", "unsupported"),
    (CHAT, chat(tools="tools"), "tools", "invalid_type"),
    (CHAT, chat(tools=[{"type": "web_search"}]), "tools[0].type", "invalid_value"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
     "tools[0].function.name", "invalid_value"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools", "invalid_value"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice="sometimes"), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "b"}}),
     "tool_choice", "invalid_value"),
    (CHAT, chat(functions=[{"name": "a"}]), "functions", "unsupported"),
    (CHAT, chat(audio={}), "audio", "unsupported"),
    (CHAT, chat(modalities=["audio"]), "modalities[0]", "invalid_value"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "invalid_value"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema",
     "invalid_value"),
    (CHAT, chat(response_format={"type": "text", "json_schema": {"name": "a", "schema": {}}}),
     "response_format.json_schema", "invalid_value"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
     "response_format.json_schema.schema", "missing_required_parameter"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "nothing"}}}), "response_format", "invalid_value"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "$ref": "file:///etc/passwd"}}}), "response_format", "invalid_value"),
    (CHAT, chat(structured_outputs={}), "structured_outputs", "invalid_value"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs",
     "invalid_value"),
    (CHAT, chat(structured_outputs={"regex": "[a"}), "structured_outputs", "invalid_value"),
    (CHAT, chat(structured_outputs={"grammar": "start: nowhere"}), "structured_outputs",
     "invalid_value"),
    (CHAT, chat(structured_outputs={"choice": []}), "structured_outputs.choice", "invalid_value"),
    (CHAT, chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
     "structured_outputs", "invalid_value"),
    (CHAT, chat(response_format="text"), "response_format", "invalid_type"),
    (CHAT, chat(stream_options={"usage": True}, stream=True), "stream_options.usage",
     "unsupported"),
    (CHAT, chat(stream_options={"include_usge": True}, stream=True), "stream_options.include_usge",
     "unknown_parameter"),
    (CHAT, chat(service_tier="slow"), "service_tier", "invalid_value"),
    # Numbers.
    (CHAT, chat(temperature=-0.1), "temperature", "invalid_value"),
    (CHAT, chat(temperature=2.1), "temperature", "invalid_value"),
    (CHAT, chat(temperature="1"), "temperature", "invalid_type"),
    (CHAT, chat(temperature=True), "temperature", "invalid_type"),
    (CHAT, chat(temperature=float("nan")), "temperature", "invalid_value"),
    (CHAT, chat(temperature=float("inf")), "temperature", "invalid_value"),
    (CHAT, chat(top_p=-0.1), "top_p", "invalid_value"),
    (CHAT, chat(top_p=1.5), "top_p", "invalid_value"),
    (CHAT, chat(top_k=-2), "top_k", "invalid_value"),
    (CHAT, chat(top_k=1.5), "top_k", "invalid_type"),
    (CHAT, chat(top_k=1 << 31), "top_k", "invalid_value"),
    (CHAT, chat(min_p=2), "min_p", "invalid_value"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty", "invalid_value"),
    (CHAT, chat(presence_penalty=3), "presence_penalty", "invalid_value"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", "invalid_value"),
    (CHAT, chat(seed=1 << 63), "seed", "invalid_value"),
    (CHAT, chat(seed="a"), "seed", "invalid_type"),
    (CHAT, chat(timeout=0), "timeout", "invalid_value"),
    (CHAT, chat(timeout=5e-324), "timeout", "invalid_value"),
    # Answers: how many, how long, how they end.
    (CHAT, chat(n=0), "n", "invalid_value"),
    (CHAT, chat(n=17), "n", "invalid_value"),
    (CHAT, chat(n=2.0), "n", "invalid_type"),
    (CHAT, chat(max_tokens=0), "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=-5), "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens="5"), "max_tokens", "invalid_type"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens=5000), "messages", "context_length_exceeded"),
    (CHAT, chat(max_tokens=10**30), "messages", "context_length_exceeded"),
    (CHAT, said("word " * 5000), "messages", "context_length_exceeded"),
    (CHAT, chat(stop=""), "stop", "invalid_value"),
    (CHAT, chat(stop=["a", ""]), "stop[1]", "invalid_value"),
    (CHAT, chat(stop=[3]), "stop[0]", "invalid_type"),
    (CHAT, chat(stop=3), "stop", "invalid_type"),
    (CHAT, chat(stop=["a"] * 17), "stop", "invalid_value"),
    (CHAT, chat(stop="a" * 1001), "stop", "invalid_value"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5", "invalid_value"),
    (CHAT, chat(logit_bias={"5": "x"}), "logit_bias.5", "invalid_type"),
    (CHAT, chat(logit_bias={"99999999": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat(logit_bias=[5]), "logit_bias", "invalid_type"),
    (CHAT, chat(logprobs=2), "logprobs", "invalid_type"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
    (CHAT, chat(stream="yes"), "stream", "invalid_type"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    # Completions.
    (TEXT, {"model": NAME}, "prompt", "missing_required_parameter"),
    (TEXT, text(prompt=""), "prompt", "invalid_value"),
    (TEXT, text(prompt=[]), "prompt", "invalid_value"),
    (TEXT, text(prompt=None), "prompt", "invalid_type"),
    (TEXT, text(prompt=3), "prompt", "invalid_type"),
    (TEXT, text(prompt=["a", ""]), "prompt[1]", "invalid_value"),
    (TEXT, text(prompt=[[1], []]), "prompt[1]", "invalid_value"),
    (TEXT, text(prompt=[5, -1]), "prompt[1]", "invalid_value"),
    (TEXT, text(prompt=[5, 999_999]), "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 65), "prompt", "invalid_value"),
    (TEXT, text(prompt=["a"] * 17), "n", "too_many_answers"),
    (TEXT, text(messages=MESSAGE), "messages", "unsupported"),
    (TEXT, text(best_of=1, n=2), "best_of", "invalid_value"),
    (TEXT, text(best_of=2, stream=True), "best_of", "invalid_value"),
    (TEXT, text(best_of=20), "best_of", "invalid_value"),
    (TEXT, text(suffix="x"), "suffix", "invalid_value"),
    (TEXT, text(logprobs=True), "logprobs", "invalid_type"),
    (TEXT, text(logprobs=21), "logprobs", "invalid_value"),
    (TEXT, text(max_tokens=0), "max_tokens", "invalid_value"),
    (TEXT, text(max_tokens=-2, echo=True), "max_tokens", "invalid_value"),
    # Embeddings.
    (EMBED, {"model": NAME}, "input", "missing_required_parameter"),
    (EMBED, embed(input=""), "input", "invalid_value"),
    (EMBED, embed(input=[]), "input", "invalid_value"),
    (EMBED, embed(input=["a", ""]), "input[1]", "invalid_value"),
    (EMBED, embed(input=[999_999]), "input", "invalid_value"),
    (EMBED, embed(input="word " * 5000), "input", "context_length_exceeded"),
    (EMBED, embed(dimensions=0), "dimensions", "invalid_value"),
    (EMBED, embed(dimensions=100_000), "dimensions", "invalid_value"),
    (EMBED, embed(encoding_format="hex"), "encoding_format", "invalid_value"),
    (EMBED, embed(pooling="max"), "pooling", "invalid_value"),
    (EMBED, embed(truncate=True), "truncate", "unsupported"),
    # Responses.
    (ITEMS, {"model": NAME}, "input", "invalid_value"),
    (ITEMS, items(input=""), "input", "invalid_value"),
    (ITEMS, items(input=[]), "input", "invalid_value"),
    (ITEMS, items(input=5), "input", "invalid_type"),
    (ITEMS, items("Hi"), "input[0]", "invalid_type"),
    (ITEMS, items({"role": "user"}), "input[0].content", "missing_required_parameter"),
    (ITEMS, items({"role": "robot", "content": "Hi"}), "input[0].role", "invalid_value"),
    (ITEMS, items({"role": "user", "content": [{"type": "input_text"}]}),
     "input[0].content[0].text", "missing_required_parameter"),
    (ITEMS, items({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}),
     "input[0].content[0].file_id", "unsupported"),
    (ITEMS, items({"role": "user", "content": [{"type": "input_audio"}]}),
     "input[0].content[0].type", "unsupported"),
    (ITEMS, items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
     "input[0].content[0].image_url", "invalid_value"),
    (ITEMS, items({"role": "user", "content": "Hi"}, {"type": "computer_call"}), "input[1].type",
     "unsupported"),
    (ITEMS, items({"type": "function_call", "name": "f"}), "input[0].call_id",
     "missing_required_parameter"),
    (ITEMS, items({"type": "function_call", "call_id": "c", "name": "f"}), "input[0].arguments",
     "missing_required_parameter"),
    (ITEMS, items({"type": "function_call_output", "call_id": "c"}), "input[0].output",
     "missing_required_parameter"),
    (ITEMS, items({"role": "user", "content": "Hi", "contnt": 1}), "input[0].contnt",
     "unknown_parameter"),
    (ITEMS, items(input="word " * 5000), "input", "context_length_exceeded"),
    (ITEMS, items(previous_response_id="resp_0"), "previous_response_id",
     "previous_response_not_found"),
    (ITEMS, items(previous_response_id=5), "previous_response_id", "invalid_type"),
    (ITEMS, items(max_output_tokens=0), "max_output_tokens", "invalid_value"),
    (ITEMS, items(max_tokens=5), "max_tokens", "unsupported"),
    (ITEMS, items(messages=MESSAGE), "messages", "unsupported"),
    (ITEMS, items(background=True), "background", "unsupported"),
    (ITEMS, items(conversation="conv_1"), "conversation", "unsupported"),
    (ITEMS, items(truncation="middle"), "truncation", "unsupported"),
    (ITEMS, items(store="yes"), "store", "invalid_type"),
    (ITEMS, items(metadata={"a": []}), "metadata.a", "invalid_type"),
    (ITEMS, items(reasoning={"effort": "much"}), "reasoning.effort", "invalid_value"),
    (ITEMS, items(tools=[{"type": "function", "name": "f"}]), "tools", "unsupported"),
    (ITEMS, items(tools=[{"type": "function"}]), "tools[0].name", "missing_required_parameter"),
    (ITEMS, items(tools=[{"type": "mcp", "server_label": "x"}]), "tools[0].type", "unsupported"),
    (ITEMS, items(tools=[{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]),
     "tools[0].tools[0].name", "missing_required_parameter"),
    (ITEMS, items(tool_choice="required"), "tool_choice", "invalid_value"),
    (ITEMS, items(tools=[{"type": "function", "name": "f"}],
                  tool_choice={"type": "function", "name": "g"}), "tool_choice", "invalid_value"),
    (ITEMS, items(tools=[{"type": "function", "name": "f"}], tool_choice={"type": "mcp"}),
     "tool_choice.type", "unsupported"),
    (ITEMS, items(text={"format": {"type": "json_schema"}}), "text.format.schema",
     "invalid_value"),
    (ITEMS, items(text={"format": {"type": "json_schema", "name": "n",
                                   "schema": {"type": "nothing"}}}), "text.format",
     "invalid_value"),
    (ITEMS, b'{"model": "mini-dense", "input": "\\ud800"}', "input", "invalid_value"),
    # Tokens.
    ("/tokenize", {}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGE}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": 5}, "prompt", "invalid_type"),
    ("/detokenize", {}, "tokens", "missing_required_parameter"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_type"),
    ("/detokenize", {"tokens": [1 << 40]}, "tokens", "invalid_value"),
]  # fmt: skip

OTHERS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", CHAT, {"json": chat(model="gpt-4")}, 404, "model_not_found"),
    ("POST", CHAT, {"content": b'{"model": "\\ud800", "messages": [{"role":"user","content":"a"}]}',
                    "headers": {"content-type": "application/json"}}, 404, "model_not_found"),
    ("GET", "/v1/models/other", {}, 404, "model_not_found"),
    ("GET", "/v1/responses/resp_0", {}, 404, "response_not_found"),
    ("DELETE", "/v1/responses/resp_0", {}, 404, "response_not_found"),
    ("POST", ITEMS, {"json": {"model": NAME, "input": [{"id": "msg_0"}]}}, 404, "item_not_found"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "model": "b"}}, 404, "model_not_found"),
    ("GET", "/v1/nothing", {}, 404, "unknown_url"),
    ("POST", "/v1/images/generations", {"json": {"model": NAME}}, 404, "unknown_url"),
    ("POST", EMBED, {"json": {"model": "b", "input": "a"}}, 404, "model_not_found"),
    ("POST", "/v1/models/load", {"json": {"model": NAME}}, 403, "models_are_fixed"),
    ("GET", "/v1/../etc/passwd", {}, 404, "unknown_url"),
    ("GET", CHAT, {}, 405, "method_not_allowed"),
    ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
    ("POST", CHAT, {"content": json.dumps(chat())}, 415, "unsupported_media_type"),
    ("POST", CHAT, {"data": {"model": NAME}}, 415, "unsupported_media_type"),
    ("POST", CHAT, {"content": json.dumps(chat()), "headers": {"content-type": "text/plain"}}, 415,
     "unsupported_media_type"),
    ("POST", CHAT, {"json": said("a" * 70_000)}, 413, "body_too_large"),
    ("GET", "/v1/models", {"headers": {"host": "evil.example"}}, 403, "host_not_allowed"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small(model: LoadedModel) -> Iterator[FastAPI]:
    yield app_on(model, max_body_bytes=65536, max_waiting=12)
    assert at_rest(model)  # what was refused left nothing behind


def name_of(value: Any) -> str | None:
    return str(value)[:60] if not isinstance(value, str) else None


@pytest.mark.parametrize(("path", "body", "param", "code"), TABLE, ids=name_of)
def test_it_is_said_what_is_wrong(
    small: FastAPI, path: str, body: Any, param: str | None, code: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    if len(content) > 65536:  # the limit is another test's
        small = app_on(small.state.service.model, max_waiting=12)

    async def work() -> None:
        async with http(small) as client:
            done = await client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
        error = done.json()["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert (done.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert (error["param"], error["code"]) == (param, code), error
        assert len(error["message"]) > 10
        assert done.headers["x-request-id"].startswith("req-")

    run(work())


@pytest.mark.parametrize(("method", "path", "request_", "status", "code"), OTHERS, ids=name_of)
def test_other_statuses(
    small: FastAPI, method: str, path: str, request_: dict[str, Any], status: int, code: str
) -> None:
    async def work() -> None:
        async with http(small) as client:
            done = await client.request(method, path, **request_)
        assert done.status_code == status, done.text
        error = done.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")

    run(work())


def test_a_body_without_a_stated_length_is_limited_too(small: FastAPI) -> None:
    async def endless() -> Any:
        for _ in range(1000):
            yield b" " * 1000

    async def work() -> None:
        async with http(small) as client:
            done = await client.post(
                CHAT, content=endless(), headers={"content-type": "application/json"}
            )
        assert done.status_code == 413

    run(work())


def test_the_good_one_still_works(small: FastAPI) -> None:
    async def work() -> None:
        async with http(small) as client:
            assert (await client.post(CHAT, json=asking())).status_code == 200

    run(work())
