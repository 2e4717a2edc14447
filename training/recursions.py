"""Mixture of recursions in plain torch: the model that is trained, and HMT's oracle for the family.

A decoder of a first layer, a block of layers that all tokens pass once and some of them again, and
a last layer (arXiv 2507.10524, "middle cycle").  Before each further recursion a router scores the
tokens that are still in it; those above a threshold go on, the others keep their state until the
last layer.  Thresholds, not the best of a sequence, choose: so no token's depth depends on later
ones, and decoding computes what training did.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from export import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

ARCHITECTURE = "MixtureOfRecursionsForCausalLM"
# What holes are told by, where recursions have keys of their own: one more number of each key, 0 or
# _HOLE, is multiplied with _ASKS in queries, which leaves a hole a probability of 0.
_HOLE, _ASKS, _WIDENED = -448.0, 8.0, 16


class Output(NamedTuple):
    """`last_hidden_state` [batch, length, width], as transformers' models call it.

    scores   f32 [recursions - 1, batch, length] of the router
    active   bool, likewise: which tokens went on
    """

    last_hidden_state: Tensor
    scores: Tensor
    active: Tensor


class Norm(nn.Module):
    """x / rms(x) * weight, summed in f32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., width], in its dtype."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, self._eps)


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; its keys and values may be given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        dim, width = config.head_dim, config.hidden_size
        self._dim = dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of normed x [batch, length, width]: [batch, kv heads, length, head_dim] each."""
        return rotate(self._heads(self.k_proj(x)), rope), self._heads(self.v_proj(x))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        keys_values: tuple[Tensor, Tensor],
        active: Tensor | None,
    ) -> Tensor:
        """Attention of normed x; positions that are not `active` [batch, length] are not seen."""
        query = rotate(self._heads(self.q_proj(x)), rope)
        key, value = keys_values
        scale = self._dim**-0.5
        if active is not None:
            holes = (~active).to(key.dtype)[:, None, :, None] * _HOLE
            key = _widen(key, holes.expand(*key.shape[:3], 1))
            query = _widen(query, torch.full_like(query[..., :1], _ASKS))
            value = functional.pad(value, (0, _WIDENED))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return self.o_proj(out[..., : self._dim].transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self._dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., width], same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor] | None = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states after the layer, and the keys and values it attended to."""
        x = self.input_layernorm(hidden)
        own = shared or self.self_attn.keys_values(x, rope)
        hidden = hidden + self.self_attn(x, rope, own, active)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), own


class Trunk(nn.Module):
    """Everything but the output layer.

    layers    the first, those of the block, the last
    router    [recursions - 1, width] and a bias for each; its input is x / rms(x)
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.recursion_layers + 2))
        self.router = nn.Linear(config.hidden_size, config.num_recursions - 1)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        *,
        shares: Sequence[float] | None = None,
        thresholds: Sequence[float] | None = None,
        use_cache: bool = False,
    ) -> Output:
        """States of ids [batch, length].

        shares       of the tokens still in it, those that go on, for each further recursion: the
                     ones with the highest scores of the whole batch.  The router learns from what
                     going on changes, as if sigmoid(score - threshold) of it were taken
        thresholds   or the scores above which tokens go on; neither: all tokens do
        """
        config = self.config
        hidden = self.embed_tokens(input_ids)
        rope = angles(config, input_ids.shape[1], hidden)
        first, *block, last = self.layers
        hidden, _ = first(hidden, rope)
        kept: list[tuple[Tensor, Tensor]] = []
        for layer in block:
            hidden, keys_values = layer(hidden, rope)
            kept.append(keys_values)
        active = torch.ones(input_ids.shape, dtype=torch.bool, device=hidden.device)
        some = thresholds is not None or (shares is not None and min(shares) < 1)
        scores_by_recursion, active_by_recursion = [], []
        for number in range(config.num_recursions - 1):
            scores = self.scores(hidden, number)
            gate = None
            if shares is not None and shares[number] < 1:
                threshold = _quantile(scores[active], 1 - shares[number])
                soft = active * (scores - threshold).sigmoid()
                active = active & (scores > threshold)
                gate = (active + soft - soft.detach()).to(hidden.dtype)
            elif thresholds is not None:
                active = active & (scores > thresholds[number])
            x = hidden
            for layer, keys_values in zip(block, kept, strict=True):
                if config.recursion_kv == "first":
                    x, _ = layer(x, rope, keys_values)
                else:
                    x, _ = layer(x, rope, None, active if some else None)
            if gate is None:
                hidden = torch.where(active[..., None], x, hidden)
            else:
                hidden = hidden + gate[..., None] * (x - hidden)
            scores_by_recursion.append(scores)
            active_by_recursion.append(active)
        hidden, _ = last(hidden, rope)
        return Output(
            self.norm(hidden), torch.stack(scores_by_recursion), torch.stack(active_by_recursion)
        )

    def scores(self, hidden: Tensor, number: int) -> Tensor:
        """What the router says before further recursion `number`: f32 [batch, length]."""
        x = functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=self.config.rms_norm_eps)
        weight, bias = self.router.weight[number].float(), self.router.bias[number].float()
        return (x * weight).sum(-1) + bias


class MixtureOfRecursions(nn.Module):
    """The model, with an output layer that is the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)
        nn.init.zeros_(self.model.router.bias)

    @property
    def device(self) -> torch.device:
        """Of its parameters."""
        return self.model.norm.weight.device

    def lm_head(self, states: Tensor) -> Tensor:
        """Logits of states [..., width]."""
        return functional.linear(states, self.model.embed_tokens.weight)

    def applications(self, active: Tensor) -> float:
        """Layers that a token passes through on average, of those that there are: 0 to 1."""
        config = self.config
        further = float(active.float().mean((1, 2)).sum()) * config.recursion_layers
        least = config.recursion_layers + 2
        return (least + further) / (least + config.recursion_layers * len(active))

    def save(self, folder: Path) -> None:
        """Write weights and configuration, which `load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.detach().cpu() for name, value in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        content = self.config.to_dict() | {"architectures": [ARCHITECTURE]}
        content |= {"model_type": "mixture_of_recursions", "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.bfloat16) -> "MixtureOfRecursions":
        """The model in `folder`, on the CPU; FP8 tiles become numbers of `dtype`."""
        content = json.loads((folder / "config.json").read_text())
        content.pop("quantization_config", None)
        model = cls(LlamaConfig(**content)).to(dtype)
        stored = load_file(folder / "model.safetensors")
        matrices = {
            name: dequantize(tensor, stored.get(f"{name}_scale_inv"), dtype)
            for name, tensor in stored.items()
            if not name.endswith("_scale_inv")
        }
        model.load_state_dict(matrices)
        return model


def configuration(vocabulary: int, context: int, kv: str, **sizes: Any) -> LlamaConfig:
    """That of mini-mor, but for `sizes`; `kv` is "own" or "first"."""
    fields: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_recursions": 4,
        "recursion_layers": 2,
        "recursion_kv": kv,
        "recursion_thresholds": {},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 7,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 4e6},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    } | sizes
    applied = fields["recursion_layers"] * fields["num_recursions"] + 2
    return LlamaConfig(num_hidden_layers=applied, **fields)


def angles(config: LlamaConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of positions 0 and on, in the dtype of `like`."""
    dim, base = config.head_dim, config.rope_parameters["rope_theta"]
    steps = torch.arange(0, dim, 2, device=like.device, dtype=torch.float32) / dim
    turns = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * base**-steps
    both = torch.cat([turns, turns], -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn heads [..., length, head_dim] by their positions."""
    cos, sin = rope
    front, back = heads.chunk(2, -1)
    return heads * cos + torch.cat([-back, front], -1) * sin


def _widen(heads: Tensor, last: Tensor) -> Tensor:
    """`last` behind the numbers of each head, and zeros to the width that flash attention takes."""
    return functional.pad(torch.cat([heads, last], -1), (0, _WIDENED - 1))


def _quantile(scores: Tensor, share: float) -> Tensor:
    """The number below or at which `share` of the scores lie."""
    scores = scores.detach()
    if not len(scores):
        return torch.zeros((), device=scores.device)
    return scores.kthvalue(min(len(scores), max(1, round(share * len(scores)))))[0]
