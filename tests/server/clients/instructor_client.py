"""https://python.useinstructor.com: answers that are models, nested, partial and several."""

import instructor
from given import FORECAST, MODEL, WEATHER, Weather
from openai import OpenAI

asked: dict = {"model": MODEL, "messages": [{"role": "user", "content": FORECAST}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    done = client.chat.completions.create(**asked, response_model=Weather, max_retries=0)
    assert done.model_dump() == WEATHER.model_dump(), mode
    parts = list(client.chat.completions.create_partial(**asked, response_model=Weather))
    assert parts[-1].model_dump() == WEATHER.model_dump()
