"""https://github.com/openai/openai-python and its helpers.md."""

import json

from given import ANSWER, ARGUMENTS, FORECAST, MODEL, QUESTION, SCHEMA, WEATHER, Weather
from openai import OpenAI, pydantic_function_tool

client = OpenAI(max_retries=0)
tools = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
]
messages: list = [{"role": "user", "content": QUESTION}]

done = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
message = done.choices[0].message
(call,) = message.tool_calls
assert done.choices[0].finish_reason == "tool_calls"
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
again = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
assert again.choices[0].message.content == ANSWER

with client.chat.completions.stream(model=MODEL, messages=messages[:1], tools=tools) as stream:
    kinds = [event.type for event in stream]
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
assert json.loads(call.function.arguments) == ARGUMENTS
assert "tool_calls.function.arguments.done" in kinds
with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
    said = "".join(event.delta for event in stream if event.type == "content.delta")
assert said == ANSWER

asked = [{"role": "user", "content": FORECAST}]
formed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Weather)
assert formed.choices[0].message.parsed == WEATHER
forced = client.chat.completions.parse(
    model=MODEL, messages=asked, tools=[pydantic_function_tool(Weather)], tool_choice="required"
)
assert forced.choices[0].message.tool_calls[0].function.parsed_arguments == WEATHER

# Responses: https://github.com/openai/openai-python/blob/main/README.md and its helpers.md.
offered: list = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
asking: dict = {"model": MODEL, "tools": offered}
first = client.responses.create(**asking, input=QUESTION)
(call,) = first.output
assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
result: dict = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
whole = [{"role": "user", "content": QUESTION}, *first.output, result]
assert client.responses.create(**asking, input=whole).output_text == ANSWER
again = client.responses.create(**asking, input=[result], previous_response_id=first.id)
assert again.output_text == ANSWER and client.responses.retrieve(again.id) == again

with client.responses.stream(**asking, input=QUESTION) as stream:
    kinds = [event.type for event in stream]
    (call,) = stream.get_final_response().output
assert json.loads(call.arguments) == ARGUMENTS
assert "response.function_call_arguments.done" in kinds
with client.responses.stream(**asking, input=whole) as stream:
    said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
assert said == ANSWER
client.responses.delete(first.id)

formed = client.responses.parse(model=MODEL, input=FORECAST, text_format=Weather)
assert formed.output_parsed == WEATHER
