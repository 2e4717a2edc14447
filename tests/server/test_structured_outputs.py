"""Answers that have a form, whatever chance says."""

import json
import re
from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field
from serving import CHAT, NAME, asking, at_rest, events_of, http, openai, run

from hmt.engine import LoadedModel


class Person(BaseModel):
    name: Literal["Vera", "Ada"]
    age: Annotated[int, Field(ge=0, le=99)]
    tall: bool | None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "kites"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WILD = {"temperature": 2.0, "max_tokens": 300}


def check(value: Any) -> None:
    assert sorted(value) == ["age", "likes", "name"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value["likes"]) <= 3 and set(value["likes"]) <= {"tea", "kites"}


def test_a_schema_is_held_to(app: FastAPI, model: LoadedModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

    async def work() -> None:
        async with http(app) as client:
            body = asking("Who?", response_format=form, seed=1, n=8, stream=False) | WILD
            done = (await client.post(CHAT, json=body)).json()
            texts = [choice["message"]["content"] for choice in done["choices"]]
            for choice, text in zip(done["choices"], texts, strict=True):
                assert choice["finish_reason"] == "stop"
                check(json.loads(text))
            assert len(set(texts)) > 1
            streamed = await client.post(CHAT, json=body | {"n": 1, "stream": True})
            parts = [event["choices"][0]["delta"].get("content", "") for event in
                     events_of(streamed.text)]  # fmt: skip
            assert "".join(parts) == texts[0]
        assert at_rest(model)

    run(work())


def test_openais_client_parses_what_it_asked_for(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.parse(
                model=NAME, messages=[{"role": "user", "content": "Who?"}], seed=3,
                temperature=0, response_format=Person, max_tokens=400,
            )  # fmt: skip
        assert isinstance(done.choices[0].message.parsed, Person)

    run(work())


def test_any_object(app: FastAPI) -> None:
    async def work() -> None:
        async with openai(app) as client:
            done = await client.chat.completions.create(
                **asking("Make JSON: Vera is 31 years old, owns a kite and lives near the tower."),
                response_format={"type": "json_object"},
            )
        assert json.loads(done.choices[0].message.content)["age"] == 31

    run(work())


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2,4}"}, r"[0-9]{3}-[a-f]{2,4}"),
        ({"choice": ["yes", "no", 'may "be"']}, r'yes|no|may "be"'),
        ({"grammar": 'start: "a"+ ("b" | "cc")'}, r"a+(b|cc)"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 7}}, r"[567]"),
    ],
    ids=str,
)
def test_other_forms(app: FastAPI, form: dict[str, Any], pattern: str) -> None:
    async def work() -> None:
        async with openai(app) as client:
            for options in ({"temperature": 0}, {"temperature": 2.0, "seed": 2, "top_p": 0.9}):
                done = await client.completions.create(
                    model=NAME, prompt="Well: ", n=4, max_tokens=60, **options, logprobs=1,
                    extra_body={"structured_outputs": form},
                )  # fmt: skip
                for choice in done.choices:
                    assert re.fullmatch(pattern, choice.text), choice.text
                    assert choice.finish_reason == "stop"

    run(work())


def test_a_form_that_is_cut_off_says_so(app: FastAPI) -> None:
    async def work() -> None:
        async with http(app) as client:
            form = {"regex": "a{50}"}
            done = await client.post(CHAT, json=asking(structured_outputs=form, max_tokens=3))
            choice = done.json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert re.fullmatch("a{3,30}", choice["message"]["content"])

    run(work())
