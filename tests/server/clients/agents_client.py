"""https://openai.github.io/openai-agents-python, with both of its APIs."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from given import ANSWER, ARGUMENTS, FORECAST, MODEL, QUESTION, WEATHER, Weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
called: list = []


@function_tool
def get_weather(city: str, days: int) -> str:
    """Tells the weather.

    Args:
        city: where
        days: how many
    """
    called.append({"city": city, "days": days})
    return "sunny"


async def check(model: object) -> None:
    called.clear()
    agent = Agent(name="A", instructions="Be brief.", model=model, tools=[get_weather])
    assert (await Runner.run(agent, QUESTION)).final_output == ANSWER
    result = Runner.run_streamed(agent, QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert result.final_output == ANSWER and "raw_response_event" in kinds
    assert called == [ARGUMENTS] * 2
    formed = Agent(name="B", model=model, output_type=Weather)
    assert (await Runner.run(formed, FORECAST)).final_output == WEATHER


async def main() -> None:
    client = AsyncOpenAI(max_retries=0)
    await check(OpenAIChatCompletionsModel(model=MODEL, openai_client=client))
    await check(OpenAIResponsesModel(model=MODEL, openai_client=client))
    await check(MODEL)  # as is their default: responses, at OPENAI_BASE_URL
    agent = Agent(name="A", model=MODEL, tools=[get_weather])
    going_on = await Runner.run(agent, QUESTION, auto_previous_response_id=True)
    assert going_on.final_output == ANSWER


asyncio.run(main())
