"""All endpoints of the APIs and of the page, as routers."""

from typing import Final

from fastapi import APIRouter

from hmt.server.anthropic import messages
from hmt.server.ollama import embeddings as ollama_embeddings
from hmt.server.ollama import models as ollama_models
from hmt.server.ollama import routes as ollama
from hmt.server.openai import adapters, chat, completions, embeddings, models, ranking
from hmt.server.page import routes as page
from hmt.server.responses import routes as responses

ROUTERS: Final[tuple[APIRouter, ...]] = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    ranking.router,
    models.router,
    adapters.router,
    messages.router,
    ollama.router,
    ollama_models.router,
    ollama_embeddings.router,
    page.router,
)
