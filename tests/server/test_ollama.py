"""Ollama's API: the same answers as elsewhere, in its words."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from serving import NAME, Call, app_on, at_rest, http, run, saying, tooled_model
from test_tool_calls import CLOCK, WEATHER
from vision_models import file_of, picture

import hmt
from hmt.contracts.request import Sampling
from hmt.engine import LoadedModel
from hmt.server.errors import ApiError
from hmt.server.ollama.schemas import Message, Options, plain_chat
from hmt.server.openai.output_parser import AnswerParser

CHAT = "/api/chat"
TEXT = "/api/generate"
USER = {"role": "user", "content": "What is 12 + 30?"}
GREEDY = {"temperature": 0, "num_predict": 12}
TOOLS = [WEATHER, {"function": CLOCK["function"]}]
DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": list(messages) or [USER], "options": GREEDY, **fields}


def text(prompt: str = "Seven", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "options": GREEDY, **fields}


def ask(app: FastAPI, method: str, path: str, body: Any = None) -> httpx2.Response:
    async def work() -> httpx2.Response:
        async with http(app) as client:
            return await client.request(method, path, json=body)

    return run(work())


def get(app: FastAPI, path: str) -> Any:
    done = ask(app, "GET", path)
    assert done.status_code == 200, done.text
    return done.json()


def told(app: FastAPI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer at once, which is also that of a stream."""
    done = ask(app, "POST", path, {**body, "stream": False})
    assert done.status_code == 200, done.text
    whole: dict[str, Any] = done.json()
    parts = streamed(app, path, body)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert said(whole) == {name: value for name, value in joined(parts).items() if value}
    last = parts[-1]
    for one in (whole, last):
        assert one["model"] == body["model"] and one["created_at"].endswith("Z")
        assert 0 < sum(one[name] for name in DURATIONS) <= one["total_duration"]
    counts = ("done_reason", "prompt_eval_count", "eval_count")
    assert [last[name] for name in counts] == [whole[name] for name in counts]
    return whole


def streamed(app: FastAPI, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, which is what comes where nothing is said."""
    done = ask(app, "POST", path, body)
    assert done.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in done.text.splitlines()]


def said(part: dict[str, Any]) -> dict[str, Any]:
    """What an object tells of the answer."""
    inside = part.get("message", part)
    names = ("content", "response", "thinking", "tool_calls")
    found = {name: inside.get(name) for name in names} | {"logprobs": part.get("logprobs")}
    return {name: value for name, value in found.items() if value}


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    everything: dict[str, Any] = {}
    for part in parts:
        for name, value in said(part).items():
            everything[name] = everything[name] + value if name in everything else value
    return everything


def test_a_chat(app: FastAPI, model: LoadedModel) -> None:
    expected = model.infer(hmt.Request([USER], 12))
    done = told(app, CHAT, chat())
    assert done["message"] == {"role": "assistant", "content": expected.text}
    assert done["prompt_eval_count"] == expected.prompt_tokens
    assert done["eval_count"] == len(expected.token_ids)
    tagged = told(app, CHAT, chat(model=f"{NAME}:latest", options=GREEDY | {"num_predict": 2}))
    assert (tagged["done_reason"], tagged["eval_count"]) == ("length", 2)
    cut = expected.text[1:2]
    short = told(app, CHAT, chat(options=GREEDY | {"stop": [cut], "num_ctx": 1 << 20}))
    assert short["message"]["content"] == expected.text[: expected.text.index(cut)]
    assert short["done_reason"] == "stop"


def test_an_answer_goes_on(app: FastAPI) -> None:
    first = told(app, CHAT, chat())["message"]["content"]
    begun = {"role": "assistant", "content": first[:1]}
    assert first == first[:1] + told(app, CHAT, chat(USER, begun))["message"]["content"]


def test_a_text(app: FastAPI, model: LoadedModel) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = model.infer(hmt.Request([system, USER], 12))
    done = told(app, TEXT, text(USER["content"], system="Be brief."))
    assert done["response"] == expected.text and "message" not in done
    raw = model.infer(hmt.Request("Seven", 12))
    done = told(app, TEXT, text(raw=True))
    assert (done["response"], done["prompt_eval_count"]) == (raw.text, raw.prompt_tokens)


def test_nothing_was_asked(app: FastAPI) -> None:
    """Clients ask so whether a model is there."""
    for path, body in ((CHAT, {"messages": []}), (TEXT, {"prompt": ""}), (TEXT, {})):
        done = ask(app, "POST", path, {"model": NAME, "keep_alive": "5m", **body}).json()
        assert (done["done"], done["done_reason"], said(done)) == (True, "load", {})


def test_forms(app: FastAPI) -> None:
    schema = {"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"],
              "additionalProperties": False}  # fmt: skip
    longer = {"options": {"seed": 1, "num_predict": 100}}
    answer = told(app, CHAT, chat(format=schema, **longer))["message"]["content"]
    assert json.loads(answer)["hour"] in (1, 2)
    assert told(app, TEXT, text(format="json", **longer))["response"].startswith("{")
    assert told(app, TEXT, text(format=""))["eval_count"] > 0


def test_log_probabilities(app: FastAPI) -> None:
    done = told(app, CHAT, chat(logprobs=True, top_logprobs=2))
    assert "".join(one["token"] for one in done["logprobs"]) == done["message"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in done["logprobs"])


def test_calls(tooled: FastAPI) -> None:
    tokenizer = tooled.state.service.model.tokenizer
    wanted = [("clock", {}), ("weather", {"city": "Bern"})]
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in wanted]
    tagged = tokenizer.tool_style.tagged
    spoken = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) if tagged else calls[0]
    with saying([*tokenizer.encode(spoken), *tokenizer.eos_ids]):
        asked = chat(model="tools", tools=TOOLS, options={"num_predict": 200})
        done = told(tooled, CHAT, asked)
    found = [one["function"] for one in done["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in found] == wanted[: len(found)]
    assert [one["index"] for one in found] == [0, 1][: len(found)] and found
    assert (done["message"]["content"], done["done_reason"]) == ("", "stop")
    result = {"role": "tool", "tool_name": "clock", "content": "12:30"}
    again = told(tooled, CHAT, chat(USER, done["message"], result, model="tools", tools=TOOLS))
    assert again["eval_count"] > 0


def test_results_belong_to_calls() -> None:
    """In Ollama's API they say the function's name, and templates want an id."""

    def call(name: str, **others: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"n": 1}}, **others}

    messages = [
        {"role": "assistant", "tool_calls": [call("a"), call("b"), call("a", id="x")]},
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_name": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call("a")], "thinking": "Hm."},
        {"role": "tool", "content": "5", "name": "a"},
    ]
    plain = plain_chat(map(Message.model_validate, messages))
    ids = [call["id"] for message in plain for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 4 and ids[2] == "x"
    results = {m["content"]: m.get("tool_call_id") for m in plain if m["role"] == "tool"}
    assert results == {"1": ids[1], "2": "x", "3": ids[0], "4": None, "5": ids[3]}
    assert plain[5]["reasoning_content"] == "Hm."
    assert plain[0]["tool_calls"][0]["function"] == {"name": "a", "arguments": {"n": 1}}


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """A server of a model whose template knows where reasoning ends, and can be told to."""
    end = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    folder = tooled_model(tmp_path_factory.mktemp("models") / "thinks", "<tool_call>", end)
    with hmt.Engine(host_memory="64MiB", context=1024, max_batch=4) as engine:
        yield app_on(engine.load_model(folder))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_reasoning_is_apart(thinks: FastAPI, path: str) -> None:
    tokenizer = thinks.state.service.model.tokenizer
    body = {"model": "thinks", "options": {"num_predict": 50}, "think": True,
            **({"messages": [USER]} if path == CHAT else {"prompt": "Why?"})}  # fmt: skip
    with saying([*tokenizer.encode("<think>\nHm, so.</think>\n\nFine."), *tokenizer.eos_ids]):
        done = told(thinks, path, body)
    answer = {"content" if path == CHAT else "response": "Fine."}
    assert said(done) == {**answer, "thinking": "Hm, so."}
    longer = told(thinks, path, body | {"think": False, "options": GREEDY})
    assert longer["prompt_eval_count"] > done["prompt_eval_count"]


def test_images(seeing: LoadedModel) -> None:
    file = file_of(picture(37, 21))
    data = base64.b64encode(file).decode()
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    expected = seeing.infer(hmt.Request([{"role": "user", "content": content}], 6, images=(file,)))
    app, options = app_on(seeing), GREEDY | {"num_predict": 6}
    asked = {"role": "user", "content": "What is this?", "images": [data]}
    done = told(app, CHAT, chat(asked, options=options))
    assert done["message"]["content"] == expected.text
    assert told(app, TEXT, text("What is this?", images=[data], options=options))["response"] == (
        expected.text
    )
    assert "vision" in ask(app, "POST", "/api/show", {"model": NAME}).json()["capabilities"]


def test_embeddings(app: FastAPI, model: LoadedModel) -> None:
    def ask_for(path: str, **fields: Any) -> Any:
        done = ask(app, "POST", path, {"model": NAME, **fields})
        assert done.status_code == 200, done.text
        return done.json()

    texts = ["A cat sat on the mat.", "It fell."]
    wanted = ask_for("/v1/embeddings", input=texts)
    vectors = [one["embedding"] for one in wanted["data"]]
    done = ask_for("/api/embed", input=texts, keep_alive="5m", options={"num_ctx": 64})
    assert (done["embeddings"], done["model"]) == (vectors, NAME)
    assert done["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
    assert done["total_duration"] > 0 and done["load_duration"] == 0
    assert ask_for("/api/embed", input=texts[0])["embeddings"] == vectors[:1]
    assert ask_for("/api/embeddings", prompt=texts[0]) == {"embedding": vectors[0]}
    short = ask_for("/v1/embeddings", input=texts, dimensions=16)["data"]
    assert ask_for("/api/embed", input=texts, dimensions=16)["embeddings"] == [
        one["embedding"] for one in short
    ]
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert ask_for("/api/embed", **nothing)["embeddings"] == []
    assert ask_for("/api/embeddings", prompt="") == {"embedding": []}
    long = "word " * 3000
    cut = model.tokenizer.encode(long)[: model.max_positions]
    (whole,) = ask_for("/v1/embeddings", input=cut)["data"]
    assert ask_for("/api/embed", input=long)["embeddings"] == [whole["embedding"]]
    assert ask_for("/api/embeddings", prompt=long) == {"embedding": whole["embedding"]}


def test_options() -> None:
    assert Options().sampling(None) == Sampling(temperature=0.8, top_k=40, top_p=0.9)
    given = Options(temperature=0, top_k=-1, top_p=0.5, min_p=0.1, seed=7, repeat_penalty=1.1,
                    presence_penalty=1, frequency_penalty=2, stop="x")  # fmt: skip
    assert given.sampling(2) == Sampling(
        temperature=0, top_k=0, top_p=0.5, min_p=0.1, repetition_penalty=1.1, frequency_penalty=2,
        presence_penalty=1, seed=7, logprobs=2,
    )  # fmt: skip
    assert 0 < Options(top_p=0).sampling(None).top_p < 1e-3  # the likeliest alone
    assert given.stops == ("x",) and Options(seed=-1).sampling(None).seed is None
    assert [Options(num_predict=one).longest for one in (None, -2, -1, 0, 5)] == [
        None, -1, -1, -1, 5,
    ]  # fmt: skip


REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, chat(model="gpt-4"), 404, "there is no model 'gpt-4'"),
    (CHAT, {"messages": [USER]}, 400, "'model' is missing"),
    (CHAT, chat({"role": "robot", "content": "Hi"}), 400, "messages[0].role"),
    (CHAT, chat({"role": "user"}), 400, "messages[0].content"),
    (CHAT, chat({**USER, "images": ["?"]}), 400, "messages[0].images"),
    (CHAT, chat({**USER, "images": ["AAAA"]}), 400, "image"),
    (CHAT, chat({**USER, "tool_calls": [{"function": {"name": "a"}}]}), 400,
     "messages[0].tool_calls"),
    (CHAT, chat(tools=TOOLS), 400, "tools: this model's chat template has no place"),
    (CHAT, chat(tools=[WEATHER, WEATHER]), 400, "tools"),
    (CHAT, chat(format="xml"), 400, "format"),
    (CHAT, chat(format={"type": "nothing"}), 400, "format"),
    (CHAT, chat(temperature=1), 400, "write it in options"),
    (CHAT, chat(options={"temperature": 3}), 400, "options.temperature"),
    (CHAT, chat(options={"temprature": 1}), 400, "did you mean 'temperature'"),
    (CHAT, chat(options={"mirostat": 1}), 400, "options.mirostat"),
    (CHAT, chat(options={"repeat_penalty": 1.1, "repeat_last_n": 64}), 400, "repeat_last_n"),
    (CHAT, chat({**USER, "content": "word " * 5000}), 400, "messages"),
    (CHAT, chat(think="much"), 400, "think"),
    (TEXT, text(context=[1, 2]), 400, "/api/chat"),
    (TEXT, text(template="{{ .Prompt }}"), 400, "template"),
    (TEXT, text(suffix="end"), 400, "suffix"),
    (TEXT, text(raw=True, system="Be brief."), 400, "system"),
    (TEXT, text(raw=True, images=["AAAA"]), 400, "images"),
    (TEXT, text("word " * 5000), 400, "prompt"),
    ("/api/embed", {"input": "Hi"}, 400, "'model' is missing"),
    ("/api/embed", {"model": NAME, "input": 5}, 400, "input"),
    ("/api/embed", {"model": NAME, "input": ["a", None]}, 400, "input[1]"),
    ("/api/embed", {"model": NAME, "prompt": "Hi"}, 400, "write input"),
    ("/api/embed", {"model": NAME, "input": "Hi", "dimensions": 9999}, 400, "dimensions"),
    ("/api/embed", {"model": NAME, "input": "word " * 5000, "truncate": False}, 400, "input"),
    ("/api/embed", {"model": "b", "input": "Hi"}, 404, "there is no model 'b'"),
    ("/api/embeddings", {"model": NAME, "input": "Hi"}, 400, "write prompt"),
    ("/api/show", {}, 400, "model"),
    ("/api/show", {"model": "b"}, 404, "there is no model 'b'"),
    ("/api/pull", {"model": NAME}, 404, "there is nothing at POST /api/pull"),
    ("/api/tags", {}, 405, "allowed: GET"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "why"), REFUSED, ids=lambda one: str(one)[:60])
def test_errors_are_a_sentence(app: FastAPI, path: str, body: Any, status: int, why: str) -> None:
    done = ask(app, "POST", path, body)
    (error,) = done.json().values()
    assert (done.status_code, list(done.json())) == (status, ["error"]), error
    assert why in error


@pytest.mark.parametrize(
    "body", [{"num_ctx": 512, "num_gpu": 99, "mirostat": 0, "typical_p": 1.0, "num_keep": 5}]
)
def test_what_must_be_accepted(app: FastAPI, body: dict[str, Any]) -> None:
    told(app, TEXT, text(options=GREEDY | body, keep_alive=-1, context=[], template="", suffix=""))


def test_a_failure_in_a_stream_is_its_last_line(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise ApiError(503, "no more room", kind="server_error")

    monkeypatch.setattr(AnswerParser, "read", fail)
    assert streamed(app, CHAT, chat()) == [{"error": "no more room"}]


def test_answers_end_when_the_client_goes(app: FastAPI, model: LoadedModel) -> None:
    async def work() -> None:
        call = Call(app, CHAT, chat(options={"num_predict": -1}))
        asked = asyncio.create_task(call.run())
        await call.wrote.wait()
        call.gone.set()
        await asked

    run(work())
    assert at_rest(model)


def test_models(app: FastAPI, model: LoadedModel) -> None:
    (listed,) = get(app, "/api/tags")["models"]
    (running,) = get(app, "/api/ps")["models"]
    assert listed["name"] == listed["model"] == NAME and len(listed["digest"]) == 64
    assert listed["size"] == model.prepared.published_bytes
    assert {name: running[name] for name in listed} == listed
    assert running["context_length"] == model.max_positions
    assert get(app, "/api/version")["hmt"] == hmt.__version__
    shown = ask(app, "POST", "/api/show", {"name": f"{NAME}:latest", "verbose": True}).json()
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == model.max_positions
    assert shown["capabilities"] == ["completion"]
    assert shown["template"]
