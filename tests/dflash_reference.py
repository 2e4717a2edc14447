"""DFlash drafters with random weights, and what they compute in plain torch.

Compared with the modules of speculators 0.9.0 (`DFlashDraftModel`), all layer types: within 2e-6 of
them in f32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from drafter_reference import rotated
from eagle3_reference import write
from torch import Tensor
from torch.nn.functional import silu

__all__ = ["Drafter", "agreeing_drafter", "random_drafter", "write"]
HEADS, KV_HEADS, DIM, FFN, EPS = 4, 2, 16, 48, 1e-5


@dataclass
class Drafter:
    """A drafter: config.json, tensors as published, and the verifier's that it uses."""

    config: dict[str, Any]
    layers: dict[str, Any]  # what config.json says of them
    tensors: dict[str, Tensor]
    theirs: dict[str, Tensor] = field(default_factory=dict)
    block: int = 5
    mask: int = 7
    first: int = 1
    states: tuple[int, ...] = (2, 5)  # as many layers come before each

    def tensor(self, name: str) -> Tensor:
        """By its name, in f32."""
        found = {k.removeprefix("verifier."): v for k, v in self.theirs.items()} | self.tensors
        return found[name].float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return x * scale * self.tensor(f"{name}.weight")

    def forward(self, last: int, states: Tensor) -> Tensor:
        """Logits of a block's rows, the first one's included, behind a text.

        last    the token behind the text, which is known
        states  of the verifier at all tokens of the text: [tokens, layers * width]
        """
        text = self.norm(states @ self.tensor("fc.weight").T, "hidden_norm")
        ids = torch.tensor([last] + [self.mask] * (self.block - 1))
        hidden = self.tensor("embed_tokens.weight")[ids]
        for number in range(self.layers["num_hidden_layers"]):
            at = f"layers.{number}."
            x = self.norm(hidden, f"{at}input_layernorm")
            hidden = hidden + self._attention(x, text, number, f"{at}self_attn.")
            x = self.norm(hidden, f"{at}post_attention_layernorm")
            gate = silu(x @ self.tensor(f"{at}mlp.gate_proj.weight").T)
            up = gate * (x @ self.tensor(f"{at}mlp.up_proj.weight").T)
            hidden = hidden + up @ self.tensor(f"{at}mlp.down_proj.weight").T
        return self.norm(hidden, "norm") @ self.tensor("lm_head.weight").T

    def _attention(self, x: Tensor, text: Tensor, layer: int, at: str) -> Tensor:
        rows = torch.cat((text, x))

        def heads(of: Tensor, name: str) -> Tensor:
            y = of @ self.tensor(f"{at}{name}_proj.weight").T
            return y.view(len(of), -1, DIM).transpose(0, 1)

        query = self._turned(self.norm(heads(x, "q"), f"{at}q_norm"), len(text))
        key = self._turned(self.norm(heads(rows, "k"), f"{at}k_norm"), 0)
        key = key.repeat_interleave(HEADS // KV_HEADS, 0)
        value = heads(rows, "v").repeat_interleave(HEADS // KV_HEADS, 0)
        scores = query @ key.transpose(1, 2) / DIM**0.5 + self._hidden(layer, len(text))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(x), -1)
        return mixed @ self.tensor(f"{at}o_proj.weight").T

    def _hidden(self, layer: int, text: int) -> Tensor:
        """-inf where a layer does not see: [block, text + block]."""
        seen = torch.ones(self.block, text + self.block, dtype=torch.bool)
        if (self.layers.get("layer_types") or ["full_attention"] * 9)[layer] != "full_attention":
            seen[:, : max(0, text - self.layers["sliding_window"])] = False
            if not self.config.get("sliding_window_non_causal"):
                seen[:, text:] = seen[:, text:].tril()
        return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)

    def _turned(self, heads: Tensor, start: int) -> Tensor:
        inverse = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
        return rotated(heads, inverse, start)


def random_drafter(
    *,
    width: int,
    vocab: int,
    seed: int = 0,
    layers: int = 2,
    draft_vocab: int = 0,
    original: bool = False,
    types: list[str] | None = None,
    said: dict[str, Any] | None = None,
    states: tuple[int, ...] = (2, 5),
) -> Drafter:
    """A drafter for a model `width` wide with `vocab` tokens.

    original   in the layout of its authors, else in that of the speculators library
    said       more fields of config.json
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": width, "intermediate_size": FFN, "head_dim": DIM,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab, "rms_norm_eps": EPS, "max_position_embeddings": 128,
        "hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0,
    }  # fmt: skip
    if types is not None:
        sizes |= {"layer_types": types, "sliding_window": 6, "use_sliding_window": True}
    joined = len(states) * width
    shapes = {"fc": (width, joined)}
    norms = {"hidden_norm": width, "norm": width}
    for number in range(layers):
        at = f"layers.{number}."
        for name, rows in {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}.items():
            shapes[f"{at}self_attn.{name}_proj"] = rows, width
        shapes[f"{at}self_attn.o_proj"] = width, HEADS * DIM
        shapes |= {f"{at}mlp.{name}_proj": (FFN, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj"] = width, FFN
        norms |= {f"{at}{name}_layernorm": width for name in ("input", "post_attention")}
        norms |= {f"{at}self_attn.{name}_norm": DIM for name in "qk"}
    tensors = {
        f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(size) for name, size in norms.items()}
    theirs = {"verifier.embed_tokens.weight": torch.randn(vocab, width)}
    theirs["verifier.lm_head.weight"] = torch.randn(vocab, width) * width**-0.5
    own = {"block_size": 5, "mask_token_id": 7, **(said or {})}
    if draft_vocab:
        tensors["lm_head.weight"] = torch.randn(draft_vocab, width) * width**-0.5
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter_(0, chosen, True)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
        "speculators_version": "0.9.0", "transformer_layer_config": sizes,
        "draft_vocab_size": draft_vocab or vocab, "aux_hidden_state_layer_ids": list(states), **own,
    }  # fmt: skip
    if original:
        asked = {
            "mask_token_id": own["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in states],
        }
        config = {
            **sizes, "architectures": ["DFlashDraftModel"], "block_size": own["block_size"],
            "dflash_config": asked,
        }  # fmt: skip
    first = 0 if own.get("sample_from_anchor") else 1
    return Drafter(
        config, sizes, tensors, theirs, own["block_size"], own["mask_token_id"], first, states
    )


def agreeing_drafter(norm: Tensor, vocab: int, mask: int) -> Drafter:
    """A drafter whose layers add nothing: it says the last token, and then what a mask looks like.

    norm   [width] of the verifier in front of its output layer
    """
    made = random_drafter(
        width=len(norm), vocab=vocab, said={"mask_token_id": mask, "sample_from_anchor": True}
    )
    for name, tensor in made.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    made.tensors["norm.weight"] = norm.data.clone()
    return made
