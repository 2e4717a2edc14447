"""https://docs.litellm.ai/docs/providers/openai_compatible and .../completion/function_call."""

import json

import litellm
from given import ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, SCHEMA, WEATHER, Weather

tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
messages: list = [{"role": "user", "content": QUESTION}]
for provider in ("openai", "hosted_vllm"):
    asked = {"model": f"{provider}/{MODEL}", "api_base": OPENAI, "api_key": "none", "tools": tools}
    done = litellm.completion(**asked, messages=messages, tool_choice="auto")
    message = done.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"tool_call_id": call.id, "role": "tool", "name": "get_weather", "content": "sunny"}
    back = [*messages, message, result]
    assert litellm.completion(**asked, messages=back).choices[0].message.content == ANSWER
    chunks = list(litellm.completion(**asked, messages=messages, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS
    stream = litellm.completion(
        **asked, messages=back, stream=True, stream_options={"include_usage": True}
    )
    said = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(said) == ANSWER
    formed = litellm.completion(
        model=asked["model"], api_base=OPENAI, api_key="none", response_format=Weather,
        messages=[{"role": "user", "content": FORECAST}],
    )  # fmt: skip
    assert Weather.model_validate_json(formed.choices[0].message.content) == WEATHER

offered: list = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
at = {"model": f"openai/{MODEL}", "api_base": OPENAI, "api_key": "none", "tools": offered}
first = litellm.responses(**at, input=QUESTION)
(call,) = first.output
assert json.loads(call.arguments) == ARGUMENTS
result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
whole = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
parts = [event for event in litellm.responses(**at, input=whole, stream=True)]
said = [event.delta for event in parts if event.type == "response.output_text.delta"]
assert "".join(said) == ANSWER and parts[-1].type == "response.completed"
