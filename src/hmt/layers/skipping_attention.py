"""Attention of some of a step's tokens, where the others skip the layer."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.model import KVLayer
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.attention import Attention
from hmt.layers.linear import Params, project

# A key is longer by 16 numbers, as kernels take them: of these the first is 0, or _HOLE where the
# token skipped.  It is multiplied with _ASKS in each query: 448 * 8 times the scale is above 104,
# behind which exp() is 0 in f32.  The numbers are of a size that FP8 has, and int8 queries bear.
_HOLE, _ASKS, _WIDENED = -448.0, 8.0, 16


class LayerApplications:
    """How many layers tokens passed through, of those that there are.

    Counted since the model was opened; for the engine's thread.
    """

    def __init__(self) -> None:
        self.applied = self.possible = 0

    def count(self, applied: int, possible: int) -> None:
        """One layer was applied to so many of a step's tokens."""
        self.applied += applied
        self.possible += possible

    @property
    def share(self) -> float:
        """Applied, of those that there are; 1 before the first token."""
        return self.applied / self.possible if self.possible else 1.0


@dataclass(frozen=True, slots=True)
class SkippingAttention:
    """`attention` of the rows of a step that do not skip the layer.

    All rows of a run are asked for at once, those that skip with queries of 0, so that pages are
    read wherever they lie.
    """

    attention: Attention

    @property
    def kv_with_holes(self) -> KVLayer:
        """What a layer keeps per token where tokens that skip must not be seen."""
        kept = self.attention.kv
        return replace(kept, key_dim=kept.key_dim + _WIDENED, relative=False)

    def append_holes(self, hidden: Tensor, layer: int, step: Step, kv: KVCache) -> None:
        """Let no token of the step be seen in `layer`.

        hidden [tokens, ...] tells the dtype and the device of keys.
        """
        key, value = self._holes(hidden, self.attention.kv_heads)
        kv.append(layer, step, key, value)

    def attend_with_holes(
        self, hidden: Tensor, rows: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Attention to the norm of hidden [rows, hidden_size], same shape, of tokens `rows`.

        Appends these to `kv`, and holes for the others.
        """
        own = self.attention
        heads = self._heads(hidden, rows, step, params)
        queries, keys, values = heads.split((own.heads, own.kv_heads, own.kv_heads), dim=1)
        tokens = hidden.new_empty(len(step.token_ids), 0)
        key, value = self._holes(tokens, own.kv_heads)
        key[rows] = torch.nn.functional.pad(keys, (0, _WIDENED))
        value[rows] = values
        kv.append(layer, step, key, value)
        query = hidden.new_zeros(len(tokens), own.heads, own.head_dim + _WIDENED)
        query[rows, :, : own.head_dim] = queries
        query[:, :, own.head_dim] = _ASKS
        return self._attend(kv, layer, step, query, rows, params)

    def attend_shared(
        self, hidden: Tensor, rows: Tensor, source: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The same over the keys and values of layer `source`, to which nothing is appended."""
        own = self.attention
        x = own.norm(hidden, params["norm"])
        queries = project(x, params, "q_proj").unflatten(1, (-1, own.head_dim))
        cos, sin = own.rotary.cos_sin(step)
        query = hidden.new_zeros(len(step.token_ids), own.heads, own.head_dim)
        query[rows] = ops.rope(queries, cos[rows], sin[rows])
        return self._attend(kv, source, step, query, rows, params)

    def _heads(self, hidden: Tensor, rows: Tensor, step: Step, params: Params) -> Tensor:
        own = self.attention
        cos, sin = own.rotary.cos_sin(step)
        return ops.attention_inputs(hidden, params, own.inputs, cos[rows], sin[rows])

    def _holes(self, hidden: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
        dim = self.attention.head_dim
        key = hidden.new_zeros(len(hidden), kv_heads, dim + _WIDENED)
        key[:, :, dim] = _HOLE
        return key, hidden.new_zeros(len(hidden), kv_heads, dim)

    def _attend(
        self, kv: KVCache, layer: int, step: Step, query: Tensor, rows: Tensor, params: Params
    ) -> Tensor:
        own = self.attention
        options: dict[str, Any] = {"scale": own.scale, "softcap": own.softcap}
        if own.sinks:
            options["sinks"] = own.sinks_of(params)
        out = kv.attend(layer, step, query, **options)
        return project(out[rows].flatten(1), params, "o_proj")
