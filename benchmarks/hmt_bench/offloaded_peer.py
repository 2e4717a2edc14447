"""transformers with accelerate's offloading: what users have for models larger than the GPU.

Weights are in bf16 in host memory, and accelerate copies each layer to the GPU when it is computed.
A few layers are measured and the time is scaled to all of the shape: they are all alike.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from hmt.base.errors import MachineError
from hmt.base.units import MIB
from hmt.profiling.random_model import Shape

_NUMBER_BYTES = 2
_SPARE_BYTES = 1 << 30  # of the GPU's memory: the driver's share, keys and values, activations
_PROMPT_TOKENS = 16


class OffloadedPeer:
    """Implements bench.gpu.Peer."""

    name = "accelerate"
    most_tokens = 3

    def __init__(self, shape: Shape, gpu_bytes: int, *, layers: int) -> None:
        """`layers` of `shape` with random weights in host memory.

        `gpu_bytes` say how many layers of the whole model would stay on the GPU.  Raises
        MachineError where accelerate is missing.
        """
        try:
            from accelerate import dispatch_model
        except ImportError as error:
            raise MachineError(f"accelerate is not installed ({error})") from error
        stay = resident_layers(shape, gpu_bytes)
        self._scale = (shape.layers - stay) / layers
        self.note = (
            f"bf16; {layers} layers in host memory measured, times {self._scale:.2f}: of "
            f"{shape.layers} layers {stay} would stay on the GPU, whose time is left out"
        )
        self._model: Any = _random_model(shape, layers)
        places: dict[str, int | str] = {f"model.layers.{index}": "cpu" for index in range(layers)}
        for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"):
            places[name] = 0
        skipped = getattr(self._model, "_skip_keys_device_placement", None)
        self._model = dispatch_model(self._model, places, main_device=0, skip_keys=skipped)
        self._vocab_size = int(shape.vocab_size or 256)

    @torch.inference_mode()
    def decode_rate(self, batch: int, tokens: int) -> float:
        """Tokens per second of `batch` sequences that decode `tokens` each, scaled."""
        ids = torch.randint(self._vocab_size, (batch, _PROMPT_TOKENS), device="cuda")
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(tokens):
            ids = out.logits[:, -1:].argmax(-1)
            cache = out.cache
            out = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        return batch * tokens / (time.perf_counter() - begin) / self._scale

    @torch.inference_mode()
    def prompt_rate(self, tokens: int) -> float:
        """Tokens per second of a prompt, scaled."""
        ids = torch.randint(self._vocab_size, (1, tokens), device="cuda")
        begin = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).cpu()
        return tokens / (time.perf_counter() - begin) / self._scale

    def close(self) -> None:
        """Give the memory back."""
        self._model = None
        torch.cuda.empty_cache()


def resident_layers(shape: Shape, gpu_bytes: int) -> int:
    """Layers in bf16 that fit beside embedding and head; not all of them."""
    dim = shape.head_dim or shape.hidden_size // shape.heads
    attention = shape.hidden_size * dim * 2 * (shape.heads + shape.kv_heads)
    layer = _NUMBER_BYTES * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    tables = 2 * _NUMBER_BYTES * int(shape.vocab_size or 0) * shape.hidden_size
    return max(0, min(shape.layers - 1, (gpu_bytes - tables - _SPARE_BYTES) // layer))


def _random_model(shape: Shape, layers: int) -> Any:
    """A Llama in host memory; its matrices are cut from one random block, for time's sake."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=int(shape.vocab_size or 256),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.heads,
        max_position_embeddings=131072,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.bfloat16()
    rotary = type(model.model.rotary_emb)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = rotary(config)  # its buffer is computed, not loaded
    block = (torch.randn(8 * MIB) * 0.02).bfloat16()
    for matrix in _matrices(model):
        flat = matrix.view(-1)
        for begin in range(0, len(flat), len(block)):
            part = flat[begin : begin + len(block)]
            part.copy_(block[: len(part)])
    return model


def _matrices(model: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.fill_(1.0)
        else:
            yield parameter.data
