"""What plain torch makes of a Llama on a GPU: bf16, layers compiled, a decode step as one graph.

A peer of HMT on models that fit, as a user of torch would write it: fused projections, a static
cache, grouped queries without repeated keys, one layer compiled for all, and the whole step of all
sequences captured.  Its decoding is timed without a scheduler, a sampler or text, which HMT's has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.units import round_up
from hmt.profiling.random_model import Shape

_EPS = 1e-6
_THETA = 500000.0
_CACHE_STEP = 128  # positions


class Layer(NamedTuple):
    """Weights of one layer; query, key and value side by side, and so gate and up."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a Llama."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


class TorchLlama:
    """Implements bench.gpu.Peer."""

    name = "torch"
    note = "bf16; layers compiled, decode steps captured, timed without scheduler and sampler"
    most_tokens = 64

    def __init__(self, shape: Shape, weights: Weights, *, compiled: bool = True) -> None:
        """`compiled` leaves it to torch.compile what kernels there are; else torch's own."""
        self._shape = shape
        self._weights = weights
        self._where = weights.head.device
        self._decode: Callable[..., Tensor] = _decode_layer
        self._prefill: Callable[..., Tensor] = _prefill_layer
        if compiled:
            self._decode = torch.compile(_decode_layer, dynamic=False, fullgraph=True)
            self._prefill = torch.compile(_prefill_layer, dynamic=False, fullgraph=True)
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}
        self._held: list[_Step] = []

    @torch.inference_mode()
    def decode_rate(self, batch: int, tokens: int) -> float:
        """Tokens per second of `batch` sequences that decode `tokens` each, from a short prompt."""
        context = round_up(tokens + 64, _CACHE_STEP)
        step = self._steps.get((batch, context))
        if step is None:
            step = self._steps[batch, context] = self._captured(batch, context)
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(tokens):
            step()
        torch.cuda.synchronize()
        return batch * tokens / (time.perf_counter() - begin)

    @torch.inference_mode()
    def prompt_rate(self, tokens: int) -> float:
        """Tokens per second of a prompt, to its last token's logits."""
        ids = torch.randint(self._shape.vocab_size or 256, (1, tokens), device=self._where)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.logits(ids).argmax(-1).cpu()
        return tokens / (time.perf_counter() - begin)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """Of the last of ids [1, tokens]: [1, vocab]."""
        cos, sin = _angles(self._shape, torch.arange(ids.shape[1], device=self._where))
        hidden = functional.embedding(ids, self._weights.embedding)
        for layer in self._weights.layers:
            hidden = self._prefill(hidden, layer, self._heads, cos, sin)
        return self._head(hidden[:, -1])

    @torch.inference_mode()
    def decode(self, ids: Tensor, context: int) -> Tensor:
        """Logits [tokens, vocab] of ids [tokens], one sequence decoded one by one."""
        step = _Step(self, 1, context)
        found = []
        for token in ids:
            step.ids.copy_(token[None, None])
            found.append(step.logits())
            step.position.add_(1)
        return torch.cat(found)

    def close(self) -> None:
        """Give the memory back."""
        self._steps.clear()
        self._held.clear()
        self._weights.layers.clear()
        nothing = torch.empty(0)
        self._weights = Weights(nothing, [], nothing, nothing)
        if self._where.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _heads(self) -> tuple[int, int]:
        return self._shape.heads, self._shape.kv_heads

    def _head(self, hidden: Tensor) -> Tensor:
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._weights.norm, _EPS)
        return functional.linear(normed, self._weights.head)

    def _captured(self, batch: int, context: int) -> Callable[[], None]:
        step = _Step(self, batch, context)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step.run()
        step.position.zero_()

        self._held.append(step)  # what the graph reads and writes
        return graph.replay


class _Step:
    """A decode step of `batch` sequences with tensors of its own."""

    def __init__(self, model: TorchLlama, batch: int, context: int) -> None:
        shape, where, dtype = model._shape, model._where, model._weights.head.dtype
        self._model = model
        dim = _head_dim(shape)
        kv = (batch, shape.kv_heads, context, dim)
        # Each in memory of its own: compiled code is slow to write what is a part of other inputs.
        self._caches = [
            [torch.zeros(kv, dtype=dtype, device=where) for _ in "kv"] for _ in range(shape.layers)
        ]
        self._positions = torch.arange(context, device=where)
        self.position = torch.zeros(1, dtype=torch.int64, device=where)
        self.ids = torch.ones(batch, 1, dtype=torch.int64, device=where)

    def logits(self) -> Tensor:
        """Of the tokens at this position: [batch, vocab]."""
        model = self._model
        cos, sin = _angles(model._shape, self.position)
        # True: attended to.
        mask = (self._positions <= self.position)[None, None, None]
        hidden = functional.embedding(self.ids, model._weights.embedding)
        for layer, cache in zip(model._weights.layers, self._caches, strict=True):
            place = (*cache, self.position, mask)
            hidden = model._decode(hidden, layer, model._heads, cos, sin, *place)
        return model._head(hidden[:, 0])

    def run(self) -> None:
        """Choose the next tokens, and go to the next position."""
        self.ids.copy_(self.logits().argmax(-1, keepdim=True))
        self.position.add_(1).remainder_(len(self._positions))


def random_weights(shape: Shape, where: torch.device, dtype: torch.dtype) -> Weights:
    """Random weights of `shape`, of a size that keeps activations finite."""
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, _head_dim(shape)
    query, kv = shape.heads * dim, shape.kv_heads * dim
    vocab = shape.vocab_size
    assert vocab is not None

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=where).normal_(0, 0.02)

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=dtype, device=where)

    def layer() -> Layer:
        qkv, out = matrix(query + 2 * kv, hidden), matrix(hidden, query)
        return Layer(ones(), qkv, out, ones(), matrix(2 * inner, hidden), matrix(hidden, inner))

    layers = [layer() for _ in range(shape.layers)]
    return Weights(matrix(vocab, hidden), layers, ones(), matrix(vocab, hidden))


def _decode_layer(
    hidden: Tensor,
    w: Layer,
    heads: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    mask: Tensor,
) -> Tensor:
    """hidden [batch, 1, width]; keys and values [batch, kv_heads, context, dim] change."""
    batch = hidden.shape[0]
    query, key, value = _projected(hidden, w, heads, cos, sin)
    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)
    # The queries of a group are the rows that share a head of keys: nothing is repeated.
    grouped = query.reshape(batch, heads[1], heads[0] // heads[1], -1)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return _finished(hidden, out.reshape(batch, 1, -1), w)


def _prefill_layer(
    hidden: Tensor, w: Layer, heads: tuple[int, int], cos: Tensor, sin: Tensor
) -> Tensor:
    """hidden [1, tokens, width]."""
    query, key, value = _projected(hidden, w, heads, cos, sin)
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return _finished(hidden, out.transpose(1, 2).flatten(2), w)


def _projected(
    hidden: Tensor, w: Layer, heads: tuple[int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, heads, tokens, dim], turned."""
    batch, tokens, width = hidden.shape
    normed = functional.rms_norm(hidden, (width,), w.attention_norm, _EPS)
    qkv = functional.linear(normed, w.qkv).view(batch, tokens, heads[0] + 2 * heads[1], -1)
    query, key, value = qkv.transpose(1, 2).split((heads[0], heads[1], heads[1]), dim=1)
    return _turned(query, cos, sin), _turned(key, cos, sin), value


def _finished(hidden: Tensor, attended: Tensor, w: Layer) -> Tensor:
    hidden = hidden + functional.linear(attended, w.out)
    normed = functional.rms_norm(hidden, hidden.shape[-1:], w.ffn_norm, _EPS)
    gate, up = functional.linear(normed, w.gate_up).chunk(2, dim=-1)
    return hidden + functional.linear(functional.silu(gate) * up, w.down)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _angles(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, dim], in the dtype of weights when multiplied."""
    dim = _head_dim(shape)
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions[:, None].float() * _THETA**-steps
    angles = torch.cat((angles, angles), dim=-1)
    dtype = torch.bfloat16 if positions.device.type == "cuda" else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _head_dim(shape: Shape) -> int:
    return shape.head_dim or shape.hidden_size // shape.heads
