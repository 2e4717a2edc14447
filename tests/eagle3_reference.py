"""EAGLE-3 drafters with random weights, and what they compute in plain torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drafter_reference import rotated
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass
class Drafter:
    """A drafter: config.json, tensors as published, and its parts by plain names.

    theirs   embedding and output layer of the model that verifies, where it has none of its own
    """

    config: dict[str, Any]
    layers: dict[str, Any]  # what config.json says of them
    tensors: dict[str, Tensor]
    theirs: dict[str, Tensor] = field(default_factory=dict)
    inverse: Tensor | None = None  # rotary frequencies; None: the usual ones

    def tensor(self, name: str) -> Tensor:
        """By the name that the speculators library has for it."""
        old = name.replace("layers.0.", "midlayer.")
        found = {k.removeprefix("verifier."): v for k, v in self.theirs.items()} | self.tensors
        return (found[name] if name in found else found[old]).float()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self.tensors or name.replace("layers.0.", "midlayer.") in self.tensors

    def linear(self, x: Tensor, name: str) -> Tensor:
        """With its bias, if it has one."""
        y = x @ self.tensor(f"{name}.weight").T
        return y + self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        scale = (x.square().mean(-1, keepdim=True) + self.layers["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensor(f"{name}.weight")

    def fused(self, states: Tensor, count: int) -> Tensor:
        """Hidden states of several layers [tokens, count * width], as one [tokens, hidden_size]."""
        if self.config.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.config.get("fc_norm"):
            parts = states.chunk(count, -1)
            states = torch.cat([self.norm(p, f"fc_norm.{n}") for n, p in enumerate(parts)], -1)
        return self.linear(states, "fc")

    def forward(self, ids: list[int], before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of all tokens, from a hidden state in front of each.

        before [tokens, hidden_size]; whatever comes later is not seen.
        """
        hidden = before
        for number in range(self.layers["num_hidden_layers"]):
            at = f"layers.{number}."
            if number:
                residual, x = hidden, self.norm(hidden, f"{at}input_layernorm")
            else:
                normed = self.norm(hidden, f"{at}hidden_norm")
                tokens = self.tensor("embed_tokens.weight")[torch.tensor(ids)]
                x = torch.cat((self.norm(tokens, f"{at}input_layernorm"), normed), -1)
                residual = normed if self.config.get("norm_before_residual") else hidden
            hidden = residual + self._attention(x, at)
            x = self.norm(hidden, f"{at}post_attention_layernorm")
            gate = silu(self.linear(x, f"{at}mlp.gate_proj"))
            up = gate * self.linear(x, f"{at}mlp.up_proj")
            hidden = hidden + self.linear(up, f"{at}mlp.down_proj")
        normed = self.norm(hidden, "norm")
        return self.linear(normed, "lm_head"), normed if self.config.get("norm_output") else hidden

    def _attention(self, x: Tensor, at: str) -> Tensor:
        dim, count = self.layers["head_dim"], len(x)
        query, key, value = (
            self.linear(x, f"{at}self_attn.{name}_proj").view(count, -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        if self.has(f"{at}self_attn.q_norm.weight"):
            query = self.norm(query, f"{at}self_attn.q_norm")
            key = self.norm(key, f"{at}self_attn.k_norm")
        query, key = self._turned(query), self._turned(key)
        shared = len(query) // len(key)
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        scores = query @ key.transpose(1, 2) / dim**0.5
        scores += torch.full((count, count), -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
        return self.linear(mixed, f"{at}self_attn.o_proj")

    def _turned(self, heads: Tensor) -> Tensor:
        dim = heads.shape[-1]
        usual = self.layers.get("rope_theta", 10000.0) ** -(torch.arange(0, dim, 2) / dim)
        inverse = usual if self.inverse is None else self.inverse
        return rotated(heads, inverse)


def random_drafter(
    *,
    width: int,
    vocab: int,
    seed: int = 0,
    hidden: int = 0,
    layers: int = 1,
    states: int = 3,
    draft_vocab: int = 0,
    original: bool = True,
    family: str = "llama",
    own_table: bool = True,
    said: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
) -> Drafter:
    """A drafter for a model `width` wide with `vocab` tokens.

    original   in the layout of its authors, else in that of the speculators library
    said       more fields of config.json
    """
    torch.manual_seed(seed)
    said, hidden = dict(said or {}), hidden or width
    sizes: dict[str, Any] = {
        "model_type": family, "hidden_size": hidden, "intermediate_size": 48, "head_dim": 16,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "hidden_act": "silu", "attention_bias": bool(said.pop("attention_bias", False)),
    }  # fmt: skip
    if rope is not None:
        sizes["rope_scaling"], sizes["rope_theta"] = rope, rope["rope_theta"]
    tensors = {"fc.weight": torch.randn(hidden, states * width) * (states * width) ** -0.5}
    for number in range(layers):
        at = f"layers.{number}." if number or not original else "midlayer."
        shapes = {"q_proj": (64, 2 * hidden), "k_proj": (32, 2 * hidden)}
        shapes |= {"v_proj": (32, 2 * hidden), "o_proj": (hidden, 64)}
        for name, (rows, columns) in shapes.items():
            columns = hidden if number and name != "o_proj" else columns
            tensors[f"{at}self_attn.{name}.weight"] = torch.randn(rows, columns) * columns**-0.5
            if sizes["attention_bias"]:
                tensors[f"{at}self_attn.{name}.bias"] = torch.randn(rows)
        for name, shape in {"gate": (48, hidden), "up": (48, hidden), "down": (hidden, 48)}.items():
            tensors[f"{at}mlp.{name}_proj.weight"] = torch.randn(shape) * shape[1] ** -0.5
        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * (not number)
        tensors |= {f"{at}{name}.weight": 1 + 0.1 * torch.randn(hidden) for name in norms}
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{at}self_attn.{name}.weight"] = 1 + 0.1 * torch.randn(16)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(hidden)
    if said.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * torch.randn(states * width)
    if said.get("fc_norm"):
        for number in range(states):
            tensors[f"fc_norm.{number}.weight"] = 1 + 0.1 * torch.randn(width)
    theirs = {"verifier.embed_tokens.weight": torch.randn(vocab, hidden)}
    theirs["verifier.lm_head.weight"] = torch.randn(vocab, hidden) * hidden**-0.5
    if own_table:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden)
    if draft_vocab:
        tensors["lm_head.weight"] = torch.randn(draft_vocab, hidden) * hidden**-0.5
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter_(0, chosen, True)
        said["draft_vocab_size"] = draft_vocab
    if original:
        if hidden != width:
            said["target_hidden_size"] = width
        config = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], **said}
    else:
        config = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0", "transformer_layer_config": sizes,
            "draft_vocab_size": draft_vocab or vocab, **said,
        }  # fmt: skip
    return Drafter(config, sizes, tensors, theirs)


def agreeing_drafter(norm: Tensor, vocab: int, layers: int = 8) -> Drafter:
    """A drafter that says the last token again: right where a text repeats one token.

    It takes the verifier's last hidden state as it is and adds nothing to it, so that its output
    layer, the verifier's, gives the verifier's logits for the token that is known by now.

    norm     [width] of the verifier in front of its output layer
    layers   of the verifier
    """
    width = len(norm)
    made = random_drafter(
        width=width, vocab=vocab, own_table=False, original=False, states=2,
        said={"eagle_aux_hidden_state_layer_ids": [layers, 0]},
    )  # fmt: skip
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        made.tensors[name].zero_()
    made.tensors["fc.weight"] = torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1)
    made.tensors["norm.weight"] = norm.data.clone()
    return made


def write(made: Drafter, folder: Path, architecture: str | None = None) -> Path:
    """The drafter as a checkpoint; `architecture`: of the verifier, as speculators' files say."""
    config = dict(made.config)
    if "speculators_model_type" in config:
        verifier = {"name_or_path": "publisher/model", "architectures": [architecture]}
        config["speculators_config"] = {"algorithm": "eagle3", "verifier": verifier}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made.tensors, folder / "model.safetensors")
    return folder
