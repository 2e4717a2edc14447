"""transformers' cache of one sequence, over HMT's pages and recurrent state.

Its layers are asked by the model's own code.  What they held before a step is read where it lies,
when it is asked for; what a step adds is taken from them behind the layer.  Layers with a window
keep all positions, as masks tell which ones count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hmt.contracts.model import KVKind, KVLayer, StateTensor

_ROWS = (DynamicLayer, DynamicIndexedLayer, DynamicSlidingWindowLayer)
_BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)

Rows = tuple[Tensor, ...]  # keys and values [1, heads, tokens, dim], and an indexer's keys behind


class UnknownStateError(Exception):
    """A model keeps what HMT's caches cannot hold.

    Only while it is tried, before anything is loaded: the model is refused then, with the module
    that asked.
    """


@dataclass(frozen=True, slots=True)
class RowSlot:
    """What a layer of the cache keeps per token.

    layer     of the cache
    shapes    (heads, numbers) of keys, of values, and of an indexer's keys, if it has one
    """

    layer: int
    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StateSlot:
    """What a layer of the cache keeps of a sequence: `kind` is "conv" or "recurrent"."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> StateTensor:
        """As the plan counts it."""
        return StateTensor(f"{self.layer}.{self.kind}.{self.index}", self.shape)


@dataclass(frozen=True)
class StageSlots:
    """What is kept while one layer of the model runs: of none, one or several cache layers."""

    rows: tuple[RowSlot, ...] = ()
    states: tuple[StateSlot, ...] = ()

    @property
    def kv(self) -> KVLayer | None:
        """The pages that hold the rows: one head, unless there is one slot of keys and values."""
        if not self.rows:
            return None
        if self._plain:
            (heads, key_dim), (_, value_dim) = self.rows[0].shapes
            return KVLayer(KVKind.FULL, heads, key_dim, value_dim)
        widths = [heads * numbers for slot in self.rows for heads, numbers in slot.shapes]
        values = sum(slot.shapes[1][0] * slot.shapes[1][1] for slot in self.rows)
        return KVLayer(KVKind.FULL, 1, sum(widths) - values, values)

    @property
    def _plain(self) -> bool:
        shapes = self.rows[0].shapes
        return len(self.rows) == 1 and len(shapes) == 2 and shapes[0][0] == shapes[1][0]

    def packed(self, cache: "SequenceCache") -> tuple[Tensor, Tensor]:
        """A step's rows as pages keep them: key and value [tokens, heads, dim]."""
        keys, values = [], []
        for slot in self.rows:
            key, value, *others = cache.new_rows(slot)
            keys += [key, *others]
            values.append(value)
        if self._plain:
            return keys[0][0].transpose(0, 1).contiguous(), values[0][0].transpose(
                0, 1
            ).contiguous()
        return _side_by_side(keys), _side_by_side(values)

    def unpacked(self, key: Tensor, value: Tensor, layer: int) -> Rows:
        """The rows of a layer of the cache, of key and value [tokens, heads, dim]."""
        if self._plain:
            return tuple(x.transpose(0, 1)[None] for x in (key, value))
        at = {"key": 0, "value": 0}
        for slot in self.rows:
            rows = []
            for number, (heads, numbers) in enumerate(slot.shapes):
                side, whole = ("value", value) if number == 1 else ("key", key)
                first, at[side] = at[side], at[side] + heads * numbers
                part = whole[:, 0, first : at[side]].unflatten(1, (heads, numbers))
                rows.append(part.transpose(0, 1)[None])
            if slot.layer == layer:
                return tuple(rows)
        raise AssertionError(f"layer {layer} of the cache is not kept here")


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    flat = [each[0].transpose(0, 1).flatten(1) for each in rows]
    return torch.cat(flat, dim=1)[:, None].contiguous()


class PagedRows(DynamicLayer):
    """A layer's keys and values: those in pages, and those of the step."""

    def bind(self, index: int, cache: "SequenceCache") -> None:
        """Say which layer of which cache it is."""
        self._index, self._cache = index, cache
        self._new: list[Tensor] = []
        self._new_index: list[Tensor] = []
        self.is_initialized = cache.start > 0

    @property
    def keys(self) -> Any:
        """All keys so far [1, heads, context, dim]."""
        return self._all(0, self._new[:1])

    @keys.setter
    def keys(self, value: Any) -> None:
        """transformers empties what it makes."""

    @property
    def values(self) -> Any:
        """All values so far [1, heads, context, dim]."""
        return self._all(1, self._new[1:])

    @values.setter
    def values(self, value: Any) -> None:
        """transformers empties what it makes."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The step's keys and values come; all so far are returned."""
        self._new = [key_states, value_states]
        self.is_initialized = True
        self._cache.noted(self._index)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """An indexer's keys [1, tokens, dim] of the step; all so far are returned."""
        self._new_index = [indexer_key_states[:, None]]
        self._cache.noted(self._index)
        return self.indexer_keys

    @property
    def indexer_keys(self) -> Any:
        """All so far [1, context, dim]."""
        found = self._all(2, self._new_index)
        return None if found is None else found[:, 0]

    def taken(self) -> list[Tensor]:
        """What the step has added, in the order of `RowSlot.shapes`."""
        return [*self._new, *self._new_index]

    def get_seq_length(self) -> int:
        """Positions so far."""
        return self._cache.start + (self._new[0].shape[-2] if self._new else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions with those of the step, and where they begin."""
        return self._cache.start + query_length, 0

    def get_max_length(self) -> int:
        """None is known."""
        return -1

    def _all(self, which: int, new: list[Tensor]) -> Tensor | None:
        before = self._cache.before(self._index)
        if before is None or len(before) <= which:
            return new[0] if new else None
        old = before[which]
        return torch.cat((old.to(new[0]), new[0]), dim=2) if new else old


class PagedRowsAndState(LinearAttentionLayer, PagedRows):  # type: ignore[misc, override]
    """A layer with keys and values and recurrent state."""

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        PagedRows.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Of the state: rows need none."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)


class SequenceCache(DynamicCache):
    """The cache of one sequence during one step.

    start    positions before the step
    """

    def __init__(
        self,
        config: Any,
        start: int,
        read: Callable[[int], Rows],
        noted: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """`read` yields a layer's rows before the step; `noted` is told of layers that keep any."""
        super().__init__(config=config)
        self.start, self._read, self.noted = start, read, noted
        self._last: tuple[int, Rows] | None = None
        self.layers = [self._ours(index, layer) for index, layer in enumerate(self.layers)]
        self.layer_class_to_replicate = None

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As transformers', of layers that the configuration may not have counted."""
        while len(self.layers) <= layer_idx:
            self.layers.append(self._ours(len(self.layers), DynamicLayer()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions so far, in a layer that counts them; before the step in others."""
        rows = [layer for layer in self.layers[layer_idx:] if isinstance(layer, PagedRows)]
        return rows[0].get_seq_length() if rows else self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Positions with those of the step, and where they begin."""
        return self.start + query_length, 0

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Tensor:
        """As transformers'."""
        self.noted(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kw)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Tensor:
        """As transformers'."""
        self.noted(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kw)

    def before(self, layer: int) -> Rows | None:
        """A layer's rows before the step; None without any."""
        if not self.start:
            return None
        if self._last is None or self._last[0] != layer:
            self._last = layer, self._read(layer)
        return self._last[1]

    def new_rows(self, slot: RowSlot) -> list[Tensor]:
        """What the step has added to a layer."""
        layer: Any = self.layers[slot.layer]
        return list(layer.taken())

    def kept_rows(self, layer: int) -> list[Tensor]:
        """The same, of any layer: nothing where it keeps none."""
        held = self.layers[layer]
        return held.taken() if isinstance(held, PagedRows) else []

    def states(self) -> Iterator[tuple[StateSlot, Tensor]]:
        """All recurrent state."""
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LinearAttentionLayer):
                continue
            for kind, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for number, tensor in held.items():
                    if tensor is not None:
                        shape = tuple(tensor.shape[1:])
                        yield StateSlot(index, kind, number, shape, tensor.dtype), tensor

    def state(self, slot: StateSlot) -> Tensor:
        """What a layer holds."""
        held: Tensor = getattr(self.layers[slot.layer], f"{slot.kind}_states")[slot.index]
        return held

    def put_state(self, slot: StateSlot, value: Tensor) -> None:
        """Let a layer hold what it held behind the step before: a copy of value [*shape]."""
        layer: Any = self.layers[slot.layer]
        getattr(layer, f"{slot.kind}_states")[slot.index] = value.to("cpu", slot.dtype)[
            None
        ].clone()
        getattr(layer, f"is_{slot.kind}_states_initialized")[slot.index] = True
        layer.has_previous_state[slot.index] = True
        layer.device, layer.dtype = torch.device("cpu"), slot.dtype
        if slot.kind == "conv":
            layer.conv_kernel_size[slot.index] = slot.shape[-1]

    def _ours(self, index: int, layer: Any) -> Any:
        if type(layer) in _BOTH:
            layer = PagedRowsAndState(number_of_states=layer.number_of_states)
        elif type(layer) in _ROWS:
            layer = PagedRows()
        elif type(layer) not in (LinearAttentionLayer, DummyLayer):
            raise UnknownStateError(f"a {type(layer).__name__}")
        if isinstance(layer, PagedRows):
            layer.bind(index, self)
        return layer
