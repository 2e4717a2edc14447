"""A KV cache of whole sequences, of which one layer needs its part for one step only."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.model import ModelSpec
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import RecurrentState, StateRun
from hmt.kernels import ops


class WholeSequences:
    """Implements KVCache for steps whose runs are whole sequences, from their first token on.

    It keeps what a layer appends until the step's next layer begins.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Of a model's layers."""
        self._layers = spec.kv_layers
        self._states = spec.state_layers
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and sequence

    def append(self, layer: int, step: Step, key: Tensor, value: Tensor | None) -> None:
        """See KVCache."""
        at = 0
        for run in step.segments:
            if run.start:
                raise AssertionError("a part of a sequence where it is wanted whole")
            rows = slice(at, at + run.length)
            its_value = key[rows, :, : self._layers[layer].value_dim]
            own = its_value if value is None else value[rows]
            self._rows[layer, run.sequence] = key[rows], own
            at += run.length

    def attend(
        self,
        layer: int,
        step: Step,
        query: Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See KVCache."""
        options: dict[str, Any] = {"start": 0, "scale": scale, "softcap": softcap}
        options["window"] = self._layers[layer].window
        parts = []
        for run in step.segments:
            rows, (key, value) = query[run.tokens], self.read(layer, run)
            if sinks is None:
                parts.append(ops.attention_output(rows, key, value, **options))
            else:
                parts.append(ops.attention(rows, key, value, sinks=sinks, **options)[0])
        return torch.cat(parts)

    def append_attend(self, layer: int, step: Step, heads: Tensor, **options: Any) -> Tensor:
        """See KVCache."""
        count = self._layers[layer].heads
        query, key, value = heads[:, : -2 * count], heads[:, -2 * count : -count], heads[:, -count:]
        self.append(layer, step, key, value)
        return self.attend(layer, step, query, **options).flatten(1)

    def state(self, layer: int, step: Step) -> RecurrentState:
        """See KVCache."""
        slots = len(step.segments)
        where = step.positions.device
        tensors = {
            one.name: torch.zeros(slots, *one.shape, device=where) for one in self._states[layer]
        }
        runs = [
            StateRun(slot, run.offset, run.length, True) for slot, run in enumerate(step.segments)
        ]
        return RecurrentState(tensors, runs)

    def read(self, layer: int, run: Segment) -> tuple[Tensor, Tensor]:
        """See KVCache."""
        return self._rows[layer, run.sequence]

    def gather(self, layer: int, run: Segment, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See KVCache."""
        key, value = self.read(layer, run)
        return key[positions], value[positions]

    def kernel_pages(self, layer: int) -> None:
        """There are none."""

    def kernel_state(self, layer: int) -> Mapping[str, Tensor] | None:
        """There is none that stays."""
        return None

    def kernel_place(self, layer: int, step: Step) -> None:
        """There is none."""

    def kernel_metadata(self, step: Step) -> None:
        """There is none."""
