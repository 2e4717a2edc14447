"""DeepSeek-V2 and V3, and families whose tokens attend to a selection."""

from hmt.models.deepseek.axk2 import AXK2
from hmt.models.deepseek.dense import (
    DeepSeekV2,
    DeepSeekV3,
    LatentDecoder,
    latent_scale,
    prediction_layers,
)
from hmt.models.deepseek.sparse import DeepSeekV32, GlmMoeDsa
