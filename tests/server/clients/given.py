"""What every client is given: a server, its model, and what that model is made to say."""

import os
import sys
from typing import Any

from pydantic import BaseModel

SERVER, MODEL = sys.argv[1:3]
OPENAI = f"{SERVER}/v1"
os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=OPENAI, ANTHROPIC_API_KEY="none",
                  ANTHROPIC_BASE_URL=SERVER)  # fmt: skip

QUESTION = "What is the weather in Rome?"
ANSWER = "It is sunny in Rome."
ARGUMENTS = {"city": "Rome", "days": 2}
DESCRIPTION = "Tells the weather."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


class Place(BaseModel):
    """Where."""

    city: str


class Weather(BaseModel):
    """The weather of a place, which is a nested model: `$defs` in its schema."""

    place: Place
    days: int


WEATHER = Weather(place=Place(city="Rome"), days=2)
WHAT = "What is in this image?"
FORECAST = "Give the weather in Rome as data."  # is answered by WEATHER, in whatever form is asked
