"""All endpoints of the APIs and of the page, as routers."""

from typing import Final

from fastapi import APIRouter

from hmt.server.anthropic import messages
from hmt.server.openai import chat, completions, embeddings, models
from hmt.server.page import routes as page
from hmt.server.responses import routes as responses

ROUTERS: Final[tuple[APIRouter, ...]] = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    models.router,
    messages.router,
    page.router,
)
