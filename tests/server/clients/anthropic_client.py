"""https://github.com/anthropics/anthropic-sdk-python, its README.md and tools.md."""

from anthropic import Anthropic, beta_tool
from given import (
    ANSWER,
    ARGUMENTS,
    DESCRIPTION,
    FORECAST,
    MODEL,
    QUESTION,
    SCHEMA,
    WEATHER,
    Weather,
)

client = Anthropic(max_retries=0)
tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": SCHEMA}
asked: dict = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
messages: list = [{"role": "user", "content": QUESTION}]

done = client.messages.create(**asked, messages=messages)
(call,) = done.content
assert (call.name, call.input, done.stop_reason) == ("get_weather", ARGUMENTS, "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
back = [*messages, {"role": "assistant", "content": done.content},
        {"role": "user", "content": [result]}]  # fmt: skip
assert client.messages.create(**asked, messages=back).content[0].text == ANSWER

with client.messages.stream(**asked, messages=messages) as stream:
    kinds = {event.type for event in stream}
    (call,) = stream.get_final_message().content
assert call.input == ARGUMENTS and "input_json" in kinds
with client.messages.stream(**asked, messages=back) as stream:
    assert "".join(stream.text_stream) == ANSWER

forecast = {"name": "Weather", "input_schema": Weather.model_json_schema()}
forced = client.messages.create(
    model=MODEL, max_tokens=200, messages=[{"role": "user", "content": FORECAST}],
    tools=[forecast], tool_choice={"type": "tool", "name": "Weather"},
)  # fmt: skip
assert Weather(**forced.content[0].input) == WEATHER


@beta_tool
def get_weather(city: str, days: int) -> str:
    """Tells the weather.

    Args:
        city: where
        days: how many
    """
    assert {"city": city, "days": days} == ARGUMENTS
    return "sunny"


runner = client.beta.messages.tool_runner(
    model=MODEL, max_tokens=200, tools=[get_weather], messages=messages
)
assert runner.until_done().content[0].text == ANSWER
