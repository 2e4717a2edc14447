"""Forms and templates of attackers, beside users: errors of those requests, and of no others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from serving import CHAT, app_on, asking, at_rest, http, run, tooled_model

import hmt
from hmt.engine import LoadedModel
from hmt.sandbox import Limits

RULES = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(4000)), 'r4000 ::= "a"'])
REFS: dict[str, Any] = {
    f"d{i}": {
        "type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]
    }
    for i in range(2500)
}  # fmt: skip
SCHEMA = {"$defs": REFS | {"d2500": {"type": "integer"}}, "$ref": "#/$defs/d0"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"'


@pytest.fixture
def impatient(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time for a token than the usual 0.2 s, so that tests need not wait for it."""
    sandbox = model.tokenizer.grammars._sandbox
    monkeypatch.setattr(sandbox, "limits", Limits(sandbox.limits.memory_bytes, 0.03))


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"grammar": RULES}},
        {"structured_outputs": {"grammar": RULES.replace("::=", ":").replace("root", "start")}},
        {"structured_outputs": {"regex": "a?" * 12_000}},
        {"structured_outputs": {"json": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
    ],
    ids=["gbnf", "lark", "regex", "json", "schema"],
)
def test_a_form_that_would_end_the_process_is_a_400(
    app: FastAPI, model: LoadedModel, form: dict[str, Any]
) -> None:
    async def work() -> None:
        async with http(app) as client:
            hostile, fine = await asyncio.gather(
                client.post(CHAT, json=asking(max_tokens=4) | form),
                client.post(CHAT, json=asking(structured_outputs={"regex": "[0-9]{3}"})),
            )
        assert hostile.status_code == 400
        error = hostile.json()["error"]
        assert "cannot be used as a grammar" in error["message"], error
        assert error["param"] == next(iter(form))
        content = fine.json()["choices"][0]["message"]["content"]
        assert len(content) == 3 and content.isdigit()
        assert at_rest(model)

    run(work())


def test_a_tool_that_would_end_the_process_is_a_400(tooled: FastAPI) -> None:
    async def work() -> None:
        async with http(tooled) as client:
            body = asking(max_tokens=4, model="tools", tools=[TOOL], tool_choice="required")
            done = await client.post(CHAT, json=body)
            assert done.status_code == 400, done.text
            again = await client.post(CHAT, json=asking(max_tokens=4, model="tools"))
            assert again.status_code == 200

    run(work())


@pytest.mark.usefixtures("impatient")
def test_neighbours_do_not_wait_for_an_ambiguous_grammar(app: FastAPI, model: LoadedModel) -> None:
    """The oracle is the same answer alone; that it came first shows that it did not wait."""
    (end,) = model.tokenizer.eos_ids
    finished: list[str] = []

    async def ask(client: Any, name: str, **others: Any) -> Any:
        done = await client.post(CHAT, json=asking(**others))
        finished.append(name)
        return done

    async def work() -> None:
        async with http(app) as client:
            alone = await ask(client, "alone", max_tokens=60)
            finished.clear()
            ambiguous, beside = await asyncio.gather(
                ask(client, "ambiguous", max_tokens=1500, logit_bias={str(end): -100},
                    structured_outputs={"grammar": AMBIGUOUS}),
                ask(client, "beside", max_tokens=60),
            )  # fmt: skip
            content = alone.json()["choices"][0]["message"]["content"]
            assert beside.json()["choices"][0]["message"]["content"] == content
            assert finished[0] == "beside"
            assert ambiguous.status_code == 400, ambiguous.text[:300]
            assert "processor time" in ambiguous.text or "max is 2000" in ambiguous.text
        assert at_rest(model)

    run(work())


@pytest.mark.usefixtures("impatient")
def test_a_stream_is_told_of_a_grammar_that_costs_too_much(
    app: FastAPI, model: LoadedModel
) -> None:
    (end,) = model.tokenizer.eos_ids

    async def work() -> None:
        async with http(app) as client:
            body = asking(
                stream=True, max_tokens=1500, logit_bias={str(end): -100},
                structured_outputs={"grammar": AMBIGUOUS + ' | "c"'},
            )  # fmt: skip
            async with client.stream("POST", CHAT, json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
        errors = [json.loads(line[5:]) for line in lines if '"error"' in line]
        assert len(errors) == 1 and "costs too much" in errors[0]["error"]["message"]
        assert at_rest(model)

    run(work())


def test_a_cancelled_answer_leaves_no_form_behind(app: FastAPI, model: LoadedModel) -> None:
    async def work() -> None:
        async with http(app) as client:
            body = asking(stream=True, max_tokens=1500, structured_outputs={"regex": "[a-z ]*"})
            body["logit_bias"] = {str(next(iter(model.tokenizer.eos_ids))): -100}
            asked = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.sleep(0.5)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            done = await client.post(CHAT, json=asking(structured_outputs={"regex": "[0-9]{3}"}))
            assert done.status_code == 200
        for _ in range(100):
            if at_rest(model):
                return
            await asyncio.sleep(0.05)
        pytest.fail("it still runs")

    run(work())


def test_a_template_that_grows_is_an_error_of_its_request(tmp_path: Path) -> None:
    """Others are answered meanwhile, by the same model without its template."""
    folder = tooled_model(tmp_path / "model", "[CALL]")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0].content == 'grow' %}{{ 'x' * 10**11 }}{% endif %}"
        "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    async def work(app: FastAPI) -> None:
        async with http(app) as client:
            looping = asyncio.create_task(client.post(CHAT, json=asking("loop", model="model")))
            await asyncio.sleep(0.2)
            health = await client.get("/health")
            plain = {"model": "model", "prompt": "Well", "max_tokens": 3}
            done = await client.post("/v1/completions", json=plain)
            assert (health.status_code, done.status_code) == (200, 200)
            assert not looping.done()
            for text, answer, why in (
                ("loop", await looping, "processor time"),
                ("grow", await client.post(CHAT, json=asking("grow", model="model")), "memory"),
            ):
                assert answer.status_code == 400 and why in answer.text, (text, answer.text)
            fine = await client.post(CHAT, json=asking("hi", model="model", max_tokens=3))
            assert fine.status_code == 200

    with hmt.Engine(host_memory="64MiB", context=2048, max_batch=4) as engine:
        run(work(app_on(engine.load_model(folder))))
