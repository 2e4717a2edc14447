"""Qwen3.5 and its successors of the same form: the text part of multimodal models."""

import torch

from hmt.models.config import Config
from hmt.models.linear_attention.qwen3_next import DeltaHybrid


class Qwen35(DeltaHybrid):
    """Qwen3-Next with dense networks, and the delta nets' projections one by one."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        sparse = [False] * config.num_hidden_layers
        super().__init__(config, dtype, grouped=False, sparse=sparse)


class Qwen35Moe(DeltaHybrid):
    """The same with experts in all layers."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        sparse = [True] * config.num_hidden_layers
        super().__init__(config, dtype, grouped=False, sparse=sparse)
