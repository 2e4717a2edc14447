"""Which of both ways a model of transformers runs in."""

from collections.abc import Mapping
from typing import Any

import torch

from hmt.base.errors import CheckpointError
from hmt.base.log import logger
from hmt.contracts.model import Model
from hmt.models.fallback import module_tree
from hmt.models.fallback.model import Fallback
from hmt.models.fallback.whole import WholeForward


def open_fallback(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> Model:
    """The model that a parsed config.json describes, by transformers' modules.

    Layer by layer over all sequences at once, where its layers can be called so; else sequence by
    sequence as a whole.  Raises UnknownArchitectureError for one that runs in neither way, with
    what the second one met, and CheckpointError.
    """
    read = module_tree.read(config)
    try:
        return Fallback(read, architecture, dtype)
    except CheckpointError as error:
        logger.debug("%s does not run layer by layer: %s", architecture, error)
    try:
        return WholeForward(read, architecture, dtype)
    except CheckpointError as error:
        text = module_tree.text_part(config)
        if text is None:
            raise
        logger.debug("%s does not run without its text part alone: %s", architecture, error)
    return open_fallback(text, text["architectures"][0], dtype)
