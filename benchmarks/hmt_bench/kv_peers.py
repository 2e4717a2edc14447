"""transformers' own caches for long contexts: all near, offloaded layer by layer, and quantized.

Their weights are in bf16 on the GPU, drawn there; keys and values of earlier positions are random.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hmt.profiling.random_model import Shape

_WARM_STEPS = 1


class CachePeer:
    """Implements bench.kv_speed.Peer with one kind of cache."""

    def __init__(self, models: "_Models", kind: str) -> None:
        """kind: near, offloaded, or the backend of a quantized cache, quanto or hqq."""
        self.name = f"transformers, {kind}"
        self.note = f"{models.dtype} weights, torch's attention, no capturing".replace("torch.", "")
        self._models, self._kind = models, kind

    @torch.inference_mode()
    def decode(self, context: int, steps: int) -> list[float]:
        """See Peer."""
        model, where = self._models.model, self._models.where
        config = model.config
        cache = _cache(self._kind, config)
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            key, value = (
                torch.empty(shape, dtype=self._models.dtype, device=where).normal_(0, 0.5)
                for _ in "kv"
            )
            cache.update(key, value, layer)
            del key, value
        ids = torch.full((1, 1), 17, device=where)
        times = []
        for _ in range(_WARM_STEPS + steps):
            begin = time.perf_counter()
            out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1)
            ids.cpu()
            times.append(time.perf_counter() - begin)
        return times[_WARM_STEPS:]

    def close(self) -> None:
        """See Peer; the model stays for the next one."""
        if self._models.where.type == "cuda":
            torch.cuda.empty_cache()


class _Models:
    """One model for all peers, made when the first one wants it."""

    def __init__(self, shape: Shape, positions: int, where: torch.device) -> None:
        self._shape, self._positions, self.where = shape, positions, where
        self.dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        self._made: Any = None

    @property
    def model(self) -> Any:
        """A Llama."""
        if self._made is None:
            self._made = _random_llama(self._shape, self._positions, self.where, self.dtype)
        return self._made


def open_peers(
    shape: Shape, positions: int, where: str = "cuda"
) -> Sequence[Callable[[], CachePeer]]:
    """Makers of peers; those of what is not installed raise ImportError."""
    models = _Models(shape, positions, torch.device(where))
    kinds = ["near", "quanto", "hqq"]
    if where == "cuda":
        kinds.append("offloaded")  # the slowest
    return [partial(CachePeer, models, kind) for kind in kinds]


def _cache(kind: str, config: Any) -> Any:
    """An empty cache.  Raises ImportError where its backend is missing."""
    from transformers import cache_utils

    if kind in ("near", "offloaded"):
        return cache_utils.DynamicCache(config=config, offloading=kind == "offloaded")
    return cache_utils.QuantizedCache(kind, config, nbits=4)


def _random_llama(shape: Shape, positions: int, where: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=int(shape.vocab_size or 256),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.heads,
        max_position_embeddings=2 * positions,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    rotary = type(model.model.rotary_emb)
    model = model.to(dtype).to_empty(device=where).eval()
    model.model.rotary_emb = rotary(config).to(where)  # its buffer is computed, not loaded
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02)
    return model
