"""LangChain's ChatOpenAI: plain answers, streams, tools, structured output."""

import os
from typing import Any, Literal

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from serving import NAME, http, run

os.environ["LANGCHAIN_TRACING_V2"] = os.environ["LANGSMITH_TRACING"] = "false"
langchain_openai = pytest.importorskip(
    "langchain_openai", reason="pip install langchain-openai for LangChain's client"
)


class Weather(BaseModel, extra="forbid"):
    """Tells the weather."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def client(app: FastAPI, name: str, transport: Any, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model=name, api_key="none", base_url="http://localhost/v1", temperature=0,
        http_async_client=transport, max_retries=0, max_tokens=120, **options,
    )  # fmt: skip


def test_answers_and_streams(app: FastAPI) -> None:
    async def work() -> None:
        async with http(app) as transport:
            chat = client(app, NAME, transport, stop=["\n\n"], seed=1, logprobs=True)
            asked = [("system", "Be brief."), ("human", "What is 12 + 30?")]
            whole = await chat.ainvoke(asked)
            assert whole.content and whole.response_metadata["finish_reason"] == "stop"
            assert whole.usage_metadata["output_tokens"] > 0
            assert whole.response_metadata["logprobs"]["content"]
            parts = [part async for part in chat.astream(asked, stream_usage=True)]
            assert "".join(part.content for part in parts) == whole.content
            assert len(parts) > 2
            (used,) = [part.usage_metadata for part in parts if part.usage_metadata]
            assert used["total_tokens"] == whole.usage_metadata["total_tokens"]
            both = await chat.abatch([asked, asked])
            assert [one.content for one in both] == [whole.content] * 2

    run(work())


def test_tools_and_structured_output(tooled: FastAPI) -> None:
    async def work() -> None:
        async with http(tooled) as transport:
            chat = client(tooled, "tools", transport)
            called = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
            done = await called.ainvoke("What is the weather?")
            (call,) = done.tool_calls
            assert call["name"] == "Weather" and isinstance(call["args"]["days"], int)
            whole = None
            async for part in called.astream("What is the weather?"):
                whole = part if whole is None else whole + part
            assert whole is not None
            assert whole.tool_calls[0]["args"] == call["args"]
            back = [("human", "What is the weather?"), done, {
                "role": "tool", "tool_call_id": call["id"], "content": "Rain."}]  # fmt: skip
            assert (await chat.bind_tools([Weather]).ainvoke(back)).content is not None
            for method in ("json_schema", "function_calling"):
                formed = chat.with_structured_output(Weather, method=method)
                assert isinstance(await formed.ainvoke("The weather in Oslo"), Weather)

    run(work())
