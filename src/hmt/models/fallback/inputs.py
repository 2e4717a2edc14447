"""What transformers' modules are called with for tokens of a step, some of which are of images."""

from typing import Any

from torch import Tensor

from hmt.contracts.step import Step
from hmt.models.fallback.device_cache import CPU


def inputs_of(model: Any, step: Step, tokens: slice) -> dict[str, Tensor]:
    """Tokens, or their embeddings where some are of images, whose features those then have.

    model   transformers', whose table is looked up by the work at hand
    """
    ids = step.token_ids[tokens].to(CPU)[None]
    if step.image_rows is None or step.image_features is None:
        return {"input_ids": ids}
    rows = step.image_rows.to(CPU)
    first, end = tokens.start or 0, len(step.token_ids) if tokens.stop is None else tokens.stop
    own = (rows >= first) & (rows < end)
    if not bool(own.any()):
        return {"input_ids": ids}
    embeddings = model.get_input_embeddings()(ids).clone()
    features = step.image_features.to(embeddings.device, embeddings.dtype)
    embeddings[0, rows[own] - first] = features[own]
    return {"inputs_embeds": embeddings}


def positions_of(step: Step, tokens: slice) -> Tensor:
    """int64 [tokens], or [3, tokens] where the step's have three axes."""
    places = step.positions if step.axes is None else step.axes
    return places[..., tokens].to(CPU)
