"""What fields do to answers, through the server; official clients send them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from serving import CHAT, NAME, app_on, asking, events_of, http, openai, run, saying

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.server import ServerConfig, create_app

TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "What is 12 + 30?"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
OTHER = {"type": "function", "function": {"name": "sun", "parameters": NOTHING}}
TEMPLATE = """\
{{- "<|begin|>" }}{% for t in tools or [] %}{{ t.function.name }},{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if kind is defined %}{{ kind | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}
{%- endif %}{# <tool_call> #}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """A model whose template has a place for everything."""
    folder = tmp_path_factory.mktemp("models") / "all"
    shutil.copytree(embedded_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with hmt.Engine(host_memory="64MiB", dtype="float32", context=512, max_batch=4) as engine:
        yield app_on(engine.load_model(folder), origins=("https://app.example",))


def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx2.Response:
    async def work() -> httpx2.Response:
        async with http(app) as client:
            return await client.post(path, json=body)

    return run(work())


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "all", "messages": [USER], "temperature": 0, "max_tokens": 4, **fields}


def prompt_of(app: FastAPI, body: dict[str, Any], path: str = CHAT) -> str:
    """The prompt that a request leads to, as text with its special tokens."""
    tokenizer, seen = app.state.service.model.tokenizer, []
    write = tokenizer.chat_prompt

    def noted(*args: Any, **named: Any) -> list[int]:
        seen.append(write(*args, **named))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "chat_prompt", lambda self, *a, **n: noted(*a, **n))
        done = post(app, path, body)
    assert done.status_code == 200, done.text
    return b"".join(map(tokenizer.token_bytes, seen[0])).decode()


BEGIN = "<|begin|><|user|>What is 12 + 30?<|end|>"
WRITTEN: list[tuple[dict[str, Any], str]] = [
    ({}, "<|assistant|>"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<|assistant|><think></think>"),
    ({"chat_template_kwargs": {"kind": {"a": [None]}}}, '{"a": [null]}<|assistant|>'),
    ({"add_generation_prompt": False}, ""),
    ({"reasoning_effort": "none"}, "<|assistant|><think></think>low"),
    ({"reasoning_effort": "minimal"}, "<|assistant|>low"),
    ({"reasoning_effort": "high"}, "<|assistant|>high"),
    ({"reasoning_effort": "max"}, "<|assistant|>high"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
     "<|assistant|>low"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "end"), WRITTEN, ids=str)
def test_what_the_template_writes(served: FastAPI, fields: dict[str, Any], end: str) -> None:
    assert prompt_of(served, chat(**fields)) == BEGIN + end
    if "reasoning_effort" not in fields:
        body = {"messages": [USER], **fields, "return_token_strs": True}
        told = post(served, "/tokenize", body).json()
        assert "".join(told["token_strs"]) == BEGIN + end


CLAUDE: list[tuple[dict[str, Any], str]] = [
    ({}, "<|assistant|>"),
    ({"thinking": {"type": "disabled"}}, "<|assistant|><think></think>"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "<|assistant|>"),
    ({"output_config": {"effort": "xhigh"}}, "<|assistant|>high"),
]


@pytest.mark.parametrize(("fields", "end"), CLAUDE, ids=str)
def test_what_anthropics_clients_make_it_write(
    served: FastAPI, fields: dict[str, Any], end: str
) -> None:
    body = {"model": "all", "max_tokens": 2, "messages": [USER], **fields}
    assert prompt_of(served, body, MESSAGES) == BEGIN + end
    counted = post(served, "/v1/messages/count_tokens", body).json()["input_tokens"]
    tokenizer = served.state.service.model.tokenizer
    assert counted == len(tokenizer.encode_bare(BEGIN + end))


def test_a_message_goes_on(served: FastAPI) -> None:
    whole = post(served, CHAT, chat(max_tokens=8)).json()["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": whole[:4]}
    wanted = BEGIN + "<|assistant|>" + whole[:4]
    body = chat(messages=[USER, begun], continue_final_message=True, add_generation_prompt=False)
    assert prompt_of(served, body) == wanted
    body = {"model": "all", "max_tokens": 4, "messages": [USER, begun]}
    assert prompt_of(served, body, MESSAGES) == wanted  # as Anthropic's always does


def test_only_allowed_tools_are_offered(served: FastAPI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = chat(tools=[TOOL, OTHER], tool_choice=choice, max_tokens=64)
    assert prompt_of(served, body).startswith("<|begin|>clock,<|user|>")
    (call,) = post(served, CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"


def test_every_chunk_counts(app: FastAPI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (
        (CHAT, asking(max_tokens=6)),
        (TEXT, {"model": NAME, "prompt": "Hello", "max_tokens": 6}),
    ):
        chunks = events_of(post(app, path, body | {"stream": True, "stream_options": options}).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and chunks[-1]["choices"] == []
        assert counts[-1] == counts[-2] > 0
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_as_long_as_the_context_goes(model: LoadedModel) -> None:
    app = app_on(model, default_new_tokens=3)
    asked = asking(ignore_eos=True, logit_bias={"1": -100})
    assert post(app, CHAT, asked).json()["usage"]["completion_tokens"] == 3
    filler = "a " * 1980
    messages = [{"role": "user", "content": filler}]
    for path, body in (
        (CHAT, asked | {"messages": messages, "max_completion_tokens": -1}),
        (TEXT, {"model": NAME, "prompt": filler, "max_tokens": -1, "ignore_eos": True}),
    ):
        used = post(app, path, body).json()["usage"]
        assert used["total_tokens"] == 2048


def test_least_and_stop_tokens(app: FastAPI, model: LoadedModel) -> None:
    prompt = model.tokenizer.chat_prompt([USER])
    plain = model.infer(hmt.Request(prompt, 12))
    done = post(app, CHAT, asking(max_tokens=20, min_tokens=15, logprobs=True)).json()
    assert done["usage"]["completion_tokens"] >= 15
    stop = plain.token_ids[1]
    done = post(app, CHAT, asking(max_tokens=12, stop_token_ids=[stop], logprobs=True)).json()
    (choice,) = done["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == model.tokenizer.decode(plain.token_ids[:1])
    assert len(choice["logprobs"]["content"]) == 1  # of the answer's own tokens
    for fields, param in (({"min_tokens": 9}, "min_tokens"), ({"stop_token_ids": [9999]},
                          "stop_token_ids")):  # fmt: skip
        told = post(app, CHAT, asking(max_tokens=5, **fields))
        assert (told.status_code, told.json()["error"]["param"]) == (400, param)


def test_a_penalty_has_two_names(app: FastAPI, model: LoadedModel) -> None:
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answers = {name: post(app, TEXT, body | {name: 1.4}).json()["choices"]
               for name in ("repetition_penalty", "repeat_penalty")}  # fmt: skip
    sampling = hmt.Sampling(repetition_penalty=1.4)
    wanted = model.infer(hmt.Request("Once upon a time", 12, sampling=sampling)).text
    assert {choices[0]["text"] for choices in answers.values()} == {wanted}


def test_a_suffix_fills_in(tmp_path: Path) -> None:
    folder = tmp_path / "fim"
    shutil.copytree(embedded_model(), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    old = {one["content"] for one in content["added_tokens"]}
    names = {"<|fim_prefix|>": 4090, "<|fim_suffix|>": 4091, "<|fim_middle|>": 4092,
             "<|fim_pad|>": 4093}  # fmt: skip
    vocabulary = content["model"]["vocab"]
    gone = {piece for piece, number in vocabulary.items() if number in names.values()} - old
    content["model"]["vocab"] = {p: n for p, n in vocabulary.items() if p not in gone} | names
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if "".join(pair) not in gone
    ]
    content["added_tokens"] += [
        {"id": number, "content": name, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False} for name, number in names.items()
    ]  # fmt: skip
    file.write_text(json.dumps(content))
    with hmt.Engine(host_memory="64MiB", context=256, max_batch=2) as engine:
        app = app_on(engine.load_model(folder))
        tokenizer = app.state.service.model.tokenizer
        body = {"model": "fim", "prompt": ["def f(", "x = "], "suffix": "): pass", "max_tokens": 5}
        with saying([*tokenizer.encode_bare("a b"), 4093]):
            done = post(app, TEXT, body).json()
        assert [one["text"] for one in done["choices"]] == ["a b", "a b"]
        assert [one["finish_reason"] for one in done["choices"]] == ["stop", "stop"]
        marked = [f"<|fim_prefix|>{p}<|fim_suffix|>): pass<|fim_middle|>" for p in body["prompt"]]
        wanted = sum(len(tokenizer.encode(text)) for text in marked)
        assert done["usage"]["prompt_tokens"] == wanted
        ollamas = {"model": "fim", "prompt": "x = ", "suffix": "): pass", "stream": False}
        with saying([*tokenizer.encode_bare("a b"), 4093]):
            filled = post(app, "/api/generate", ollamas).json()
        assert (filled["response"], filled["done_reason"]) == ("a b", "stop")
        assert filled["prompt_eval_count"] == len(tokenizer.encode(marked[1]))
        assert post(app, TEXT, body | {"suffix": ""}).status_code == 200
        for fields, param in (({"echo": True}, "echo"), ({"prompt": [1, 2]}, "suffix")):
            told = post(app, TEXT, body | fields).json()["error"]
            assert told["param"] == param


def test_what_the_tokenizer_is(app: FastAPI, model: LoadedModel) -> None:
    async def work() -> None:
        async with http(app) as client:
            told = (await client.get("/tokenizer_info", params={"model": NAME})).json()
            assert (await client.get("/tokenizer_info?model=x")).status_code == 404
            bare = {"prompt": "<|begin|>Hi", "add_special_tokens": False}
            tokens = (await client.post("/tokenize", json=bare)).json()["tokens"]
        stated = json.loads((embedded_model() / "tokenizer_config.json").read_text())
        assert {name: told[name] for name in ("bos_token", "eos_token", "tokenizer_class")} == {
            name: stated[name] for name in ("bos_token", "eos_token", "tokenizer_class")
        }
        template = (embedded_model() / "chat_template.jinja").read_text(encoding="utf-8")
        assert told["chat_template"] == template
        assert tokens == model.tokenizer.encode_bare("<|begin|>Hi")

    run(work())


def test_head_is_get_without_a_body(app: FastAPI) -> None:
    async def work() -> None:
        async with http(app) as client:
            for path in ("/", "/health", "/ready", "/v1/models", f"/v1/models/{NAME}", "/metrics",
                         "/openapi.json", "/v1/nothing"):  # fmt: skip
                got, head = await client.get(path), await client.head(path)
                assert (head.status_code, head.content) == (got.status_code, b"")
                assert head.headers["content-type"] == got.headers["content-type"]
            refused = await client.head(CHAT)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")

    run(work())


def test_browsers_may_send_what_clients_send(served: FastAPI) -> None:
    """Of the official clients' own requests all headers; browsers ask for them beforehand."""

    async def work() -> None:
        async with http(served) as client:
            seen: set[str] = set()

            async def note(request: httpx2.Request) -> None:
                seen.update(request.headers)

            client.event_hooks["request"].append(note)
            theirs = AsyncOpenAI(
                api_key="none", base_url="http://localhost/v1", http_client=client,
                organization="o", project="p",
            )  # fmt: skip
            await theirs.chat.completions.create(**chat(max_tokens=1))
            claude = anthropic.AsyncAnthropic(
                api_key="none", base_url="http://localhost", http_client=client
            )
            await claude.beta.messages.create(
                model="all", max_tokens=1, messages=[USER], betas=["x"]
            )
            sent = frozenset(seen)
            assert {"x-stainless-os", "anthropic-version", "anthropic-beta",
                    "openai-organization"} <= sent  # fmt: skip
            asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": ",".join(sorted(sent)),
                     "Access-Control-Request-Private-Network": "true"}  # fmt: skip
            allowed = await client.options(CHAT, headers=asked)
            assert allowed.status_code == 200, allowed.text
            told = allowed.headers["access-control-allow-headers"].lower().replace(" ", "")
            assert sent <= set(told.split(","))
            assert allowed.headers["access-control-allow-private-network"] == "true"
            other = await client.options(CHAT, headers=asked | {"Origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers

    run(work())


def test_the_clients_own_answers_come_back(app: FastAPI) -> None:
    """The cases of the issue, by the official clients."""

    async def work() -> None:
        async with openai(app) as client:
            first = await client.chat.completions.create(**asking(max_tokens=5))
            back = first.choices[0].message.model_dump()
            done = await client.chat.completions.create(
                model=NAME, messages=[USER, back, USER], max_tokens=2,
                extra_body={"never_heard_of": 1, "chat_template_kwargs": {"kind": None}},
            )  # fmt: skip
            assert done.choices
        async with http(app) as raw:
            client = anthropic.AsyncAnthropic(
                api_key="none", base_url="http://localhost", http_client=raw, max_retries=0
            )
            first = await client.beta.messages.create(
                model=NAME, max_tokens=5, messages=[USER], thread={"type": "create"},
                context_management={"edits": []}, output_config={"effort": "high"},
                betas=["context-management-2025-06-27"],
            )  # fmt: skip
            back = {"role": "assistant", "content": [one.model_dump() for one in first.content]}
            again = await client.messages.create(
                model=NAME, max_tokens=2, messages=[USER, back, USER]
            )
            assert again.content
            # No thread is held.  The client reads this code, and sends its conversation whole.
            with pytest.raises(anthropic.NotFoundError, match="send all messages") as none:
                await client.beta.messages.create(
                    model=NAME, max_tokens=2, messages=[USER],
                    thread={"type": "continue", "previous_message_id": first.id},
                )  # fmt: skip
            assert none.value.error_code == "thread_not_found"

    run(work())


def test_anthropics_answers_have_a_form(served: FastAPI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "schema": schema}
    body = {"model": "all", "max_tokens": 60, "messages": [USER], "temperature": 0}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        (block,) = post(served, MESSAGES, body | fields).json()["content"]
        assert json.loads(block["text"]) == {"a": 1}
    told = post(served, MESSAGES, body | {"output_format": {"type": "json_schema", "schema": {
        "type": "nothing"}}})  # fmt: skip
    assert told.status_code == 400 and "output_config" in told.json()["error"]["message"]


def test_the_users_own_template(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    source = tokenizer._template_source
    try:
        app = create_app(model, ServerConfig(chat_template="mine{{ messages[0].content }}"))
        wanted = tokenizer.encode_bare("mineWhat is 12 + 30?")
        assert post(app, "/tokenize", {"messages": [USER]}).json()["tokens"] == wanted
    finally:
        tokenizer.use_chat_template(source or "")
