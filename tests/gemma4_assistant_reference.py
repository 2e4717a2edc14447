"""Gemma 4 and its assistant with random weights, as transformers computes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

Shared = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by kind of layer: (keys, values)
KINDS = ["sliding_attention", "full_attention"]
WINDOW = 6


def _text(vocab: int, hidden: int, layers: list[str], **changed: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=48, num_hidden_layers=len(layers),
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        layer_types=layers, sliding_window=WINDOW, max_position_embeddings=512,
        attention_k_eq_v=True, final_logit_softcapping=30.0,
        **changed,
    )  # fmt: skip


def _random(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape))
            elif "embed_tokens" not in name:
                tensor.copy_(torch.randn(tensor.shape) * tensor.shape[1] ** -0.5)
            else:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model.eval()


def random_gemma4(vocab: int, seed: int) -> PreTrainedModel:
    """A model of four layers, 64 wide."""
    torch.manual_seed(seed)
    return _random(Gemma4ForCausalLM(_text(vocab, 64, KINDS * 2, num_kv_shared_layers=0)))


def random_assistant(vocab: int, seed: int, *, clusters: int = 0) -> PreTrainedModel:
    """Its assistant: three layers, 32 wide; `clusters`: of tokens, of which three get logits."""
    torch.manual_seed(seed)
    config = Gemma4AssistantConfig(
        text_config=_text(vocab, 32, [KINDS[0], *KINDS], num_kv_shared_layers=3),
        backbone_hidden_size=64, use_ordered_embeddings=bool(clusters),
        num_centroids=clusters or 2048, centroid_intermediate_top_k=3,
    )  # fmt: skip
    model = _random(Gemma4AssistantForCausalLM(config))
    if clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(vocab))
    return model


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As published: without the output layer, which is the embedding."""
    return {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}


def write(model: PreTrainedModel, folder: Path) -> Path:
    """The model as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(model), folder / "model.safetensors")
    return folder


def draft(
    assistant: PreTrainedModel, model: PreTrainedModel, tokens: list[int], count: int
) -> tuple[torch.Tensor, list[int], tuple[Shared, torch.Tensor]]:
    """Logits of the draft tokens behind a text [count, vocab], these tokens, and what they see.

    That is the KV cache of the text but for its last token, and the hidden state of the one
    before that, [1, width].  Layers with a window see as many positions as the model's own do.
    """
    ids = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        found = model.model(ids, return_shared_kv_states=True)
        shared = {
            kind: tuple(part[:, :, -WINDOW:] if kind == KINDS[0] else part for part in pair)
            for kind, pair in found.shared_kv_states.items()
        }
        hidden, last = found.last_hidden_state[:, -1:], torch.tensor([[tokens[-1]]])
        logits = []
        for _ in range(count):
            embedded = model.get_input_embeddings()(last)
            out = assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1), shared_kv_states=shared,
                position_ids=torch.tensor([[len(tokens) - 1]]),
            )  # fmt: skip
            last, hidden = out.logits.argmax(-1), out.last_hidden_state
            logits.append(out.logits[0, 0])
    rows = torch.stack(logits)
    seen = dict(found.shared_kv_states.items()), found.last_hidden_state[0, -1:]
    return rows, rows.argmax(1).tolist(), seen
