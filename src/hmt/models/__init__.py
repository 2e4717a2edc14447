"""Model families: one readable file each, in forward order."""

from hmt.models.registry import (
    open_model,
    open_predictor,
    supported_architectures,
    with_architecture,
)
