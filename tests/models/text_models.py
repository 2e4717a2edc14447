"""Causal language models of text parts for which transformers has no class of its own."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, Glm5NextTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextPreTrainedModel,
    Glm5NextTextModel,
)


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """What Glm5NextForConditionalGeneration computes of text, without its vision tower."""

    config: Glm5NextTextConfig
    config_class = Glm5NextTextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **options)
        logits = self.lm_head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, cache=out.cache)


# transformers leaves classes for its own configurations aside without `exist_ok`.
AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
