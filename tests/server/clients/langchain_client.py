"""https://docs.langchain.com/oss/python/integrations/chat/openai."""

from given import ANSWER, ARGUMENTS, FORECAST, MODEL, OPENAI, QUESTION, WEATHER, Weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str, days: int) -> str:
    """Tells the weather."""
    assert {"city": city, "days": days} == ARGUMENTS
    return "sunny"


chat = ChatOpenAI(model=MODEL, base_url=OPENAI, api_key="none", max_retries=0)
bound = chat.bind_tools([get_weather], strict=True)
asked: list = [HumanMessage(QUESTION)]
done = bound.invoke(asked)
result = get_weather.invoke(done.tool_calls[0])
assert isinstance(result, ToolMessage)
assert bound.invoke([*asked, done, result]).content == ANSWER
whole = None
for part in bound.stream(asked):
    whole = part if whole is None else whole + part
assert whole is not None and whole.tool_calls[0]["args"] == ARGUMENTS
parts = [str(part.content) for part in bound.stream([*asked, done, result])]
assert "".join(parts) == ANSWER and len(parts) > 2
for method in ("json_schema", "function_calling"):
    assert chat.with_structured_output(Weather, method=method).invoke(FORECAST) == WEATHER
