"""Operations on weights of which some rows of a step have adapters: contracts/adapter.py.

Products are the backend's own, to which each adapter's are added.  So a row without an adapter has
the bits that it has in a step without any, and one with an adapter those that it has alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hmt.base.errors import AdapterError
from hmt.contracts.adapter import AdaptedParams, AdaptedWeight
from hmt.contracts.encoding import WeightTensor
from hmt.kernels.backend_registry import Backend
from hmt.kernels.reference import Expert, matrix_name

Params = Mapping[str, WeightTensor]


class AdaptedOperations:
    """Operations of a backend, whose products add what adapters add."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._backend, operation)

    def linear(self, x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
        """`reference.linear`."""
        if not isinstance(w, AdaptedWeight):
            out: Tensor = self._backend.linear(x, w, bias)
            return out
        out = self._backend.linear(x, w.base, bias)
        self._add(out, x, w)
        return out

    def linear_into(self, out: Tensor, x: Tensor, w: WeightTensor) -> None:
        """`reference.linear_into`."""
        out.copy_(self.linear(x, w))

    def linear_many(self, x: Tensor, params: Params, names: tuple[str, ...]) -> Tensor:
        """`reference.linear_many`."""
        if not isinstance(params, AdaptedParams):
            whole: Tensor = self._backend.linear_many(x, params, names)
            return whole
        out: Tensor = self._backend.linear_many(x, params.base, names)
        first = 0
        for name in names:
            end = first + params[name].shape[0]
            if (adapted := params.adapted.get(name)) is not None:
                self._add(out[:, first:end], x, adapted)
            first = end
        return out

    def experts(
        self,
        x: Tensor,
        given: Sequence[Expert],
        chosen: Tensor,
        scales: Tensor,
        activation: str,
        total: Tensor | None,
        *,
        last: bool,
    ) -> Tensor:
        """`reference.experts`, of which each has AdaptedParams.

        Rows whose adapter has a part in any of the layer's experts take all of theirs one by one,
        so that no bit depends on which experts are given together; others take them as ever.
        """
        held = given[0][1]
        assert isinstance(held, AdaptedParams) and held.rows is not None
        numbers = torch.tensor(held.rows.numbers, device=x.device)
        plain, own = torch.where(numbers == 0)[0], torch.where(numbers != 0)[0]
        if total is None:
            width = held["down_proj"].shape[0]
            total = torch.zeros(len(x), width, dtype=torch.float32, device=x.device)
        if len(plain):
            bare = [(index, _base_of(params)) for index, params in given]
            sums = total[plain]
            total[plain] = self._backend.experts(
                x[plain], bare, chosen[plain], scales[plain], activation, sums, last=False
            )
        for index, params in given:
            self._add_expert(total, x, index, params, (chosen, scales), activation, own)
        return total.to(x.dtype) if last else total

    def _add_expert(
        self,
        total: Tensor,
        x: Tensor,
        index: int,
        params: Params,
        routing: tuple[Tensor, Tensor],
        activation: str,
        own: Tensor,
    ) -> None:
        """Add to `total` what an expert gives for those of the rows `own` that go to it."""
        assert isinstance(params, AdaptedParams)
        chosen, scales = routing
        at, places = torch.where(chosen[own] == index)
        for adapted in params.adapted.values():
            adapted.applied()
        if not len(at):
            return
        tokens = own[at]

        def project(values: Tensor, name: str) -> Tensor:
            name = matrix_name(params, name)
            bias, weight = params.get(f"{name}_bias"), params[name]
            if isinstance(weight, AdaptedWeight):
                weight = weight.only(weight.rows.chosen(tokens))
            return self.linear(values, weight, None if bias is None else bias.data)

        rows = x[tokens]
        gate, up = project(rows, "gate_proj"), project(rows, "up_proj")
        out = project(self._backend.gated(gate, up, activation), "down_proj")
        total[tokens] += out.float() * scales[tokens, places, None]

    def _add(self, out: Tensor, x: Tensor, w: AdaptedWeight) -> None:
        if len(x) != len(w.rows):
            raise AdapterError(
                f"adapters were asked for in a step of {len(w.rows)} tokens, of which this model "
                f"takes {len(x)} apart in a layer that they change; leave the adapter out"
            )
        self._backend.add_low_rank(out, x, w)
        w.applied()


def _base_of(params: Params) -> Params:
    return params.base if isinstance(params, AdaptedParams) else params


_OPERATIONS: dict[Backend, AdaptedOperations] = {}


def adapted(backend: Backend) -> AdaptedOperations:
    """Those of `backend`, kept."""
    found = _OPERATIONS.get(backend)
    if found is None:
        found = _OPERATIONS[backend] = AdaptedOperations(backend)
    return found


def adapts(params: Params, names: Sequence[str]) -> bool:
    """Whether any of these parameters has adapters."""
    return isinstance(params, AdaptedParams) and any(name in params.adapted for name in names)
