"""https://ai.pydantic.dev/models/openai and https://ai.pydantic.dev/tools."""

import asyncio

from given import ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, WEATHER, Weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

called: list = []


def get_weather(city: str, days: int) -> str:
    """Tells the weather."""
    called.append({"city": city, "days": days})
    return "sunny"


async def check(model: object) -> None:
    called.clear()
    agent = Agent(model, tools=[get_weather], instructions="Be brief.")
    assert (await agent.run(QUESTION)).output == ANSWER
    async with agent.run_stream(QUESTION) as result:
        parts = [part async for part in result.stream_text(delta=True)]
    assert "".join(parts) == ANSWER
    assert called == [ARGUMENTS] * 2


async def main() -> None:
    provider = OpenAIProvider(base_url=OPENAI, api_key="none")
    for model in (OpenAIChatModel, OpenAIResponsesModel):
        openai = model(MODEL, provider=provider)
        await check(openai)
        for kind in (Weather, NativeOutput(Weather)):
            assert (await Agent(openai, output_type=kind).run(FORECAST)).output == WEATHER


asyncio.run(main())
