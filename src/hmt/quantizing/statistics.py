"""Statistics of linear layers' inputs, summed up as these come."""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from hmt.quant.methods.interface import Needs, Statistics

SAMPLE_ROWS: Final = 512  # that are kept of a layer's inputs
_AT_ONCE: Final = 2048  # tokens whose products are one sum


class Collector:
    """Sums up the inputs of layers that share them.

    samples   rows [rows, inputs] of the first tokens that came
    """

    def __init__(self, needs: Needs, columns: int, where: torch.device) -> None:
        """For inputs of `columns` numbers, on the device `where`."""

        def zeros(need: Needs, *shape: int) -> Tensor | None:
            return torch.zeros(shape, device=where) if need in needs else None

        self.tokens = 0
        self._hessian = zeros(Needs.HESSIAN, columns, columns)
        self._sum_abs = zeros(Needs.MEAN_ABS, columns)
        self._max_abs = zeros(Needs.MAX_ABS, columns)
        self._samples: list[Tensor] | None = [] if Needs.SAMPLES in needs else None

    def add(self, inputs: Tensor) -> None:
        """Add inputs [tokens, columns] of any float dtype."""
        for start in range(0, len(inputs), _AT_ONCE):
            rows = inputs[start : start + _AT_ONCE].float()
            if self._hessian is not None:
                self._hessian.addmm_(rows.T, rows)
            if self._sum_abs is not None:
                self._sum_abs += rows.abs().sum(0)
            if self._max_abs is not None and len(rows):
                torch.maximum(self._max_abs, rows.abs().amax(0), out=self._max_abs)
            if self._samples is not None and self.tokens < SAMPLE_ROWS:
                self._samples.append(rows[: SAMPLE_ROWS - self.tokens].clone())
            self.tokens += len(rows)

    def result(self) -> Statistics:
        """Of what came by now.  Its tensors are the collector's own."""
        return Statistics(
            self.tokens,
            self._hessian,
            None if self._sum_abs is None else self._sum_abs / max(1, self.tokens),
            None if self._samples is None else _joined(self._samples),
            self._max_abs,
        )


def nbytes(needs: Needs, columns: int) -> int:
    """What a collector takes at most."""
    numbers = columns * columns if Needs.HESSIAN in needs else 0
    numbers += 2 * columns if Needs.MEAN_ABS in needs else 0
    numbers += columns if Needs.MAX_ABS in needs else 0
    numbers += 2 * SAMPLE_ROWS * columns if Needs.SAMPLES in needs else 0
    return 4 * numbers


def of_all(parts: Iterable[Statistics]) -> Statistics:
    """Statistics of the tokens of all parts together, which have inputs of as many numbers."""
    total = Statistics(0)
    for part in parts:
        tokens = total.tokens + part.tokens
        total = Statistics(
            tokens,
            _sum(total.hessian, part.hessian),
            _mean(total, part, tokens),
            _rows(total.samples, part.samples),
            _larger(total.max_abs, part.max_abs),
        )
    return total


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other.clone()
    return one.add_(other)


def _mean(one: Statistics, other: Statistics, tokens: int) -> Tensor | None:
    if one.mean_abs is None or other.mean_abs is None or not tokens:
        return one.mean_abs if other.mean_abs is None else other.mean_abs
    return (one.mean_abs * one.tokens + other.mean_abs * other.tokens) / tokens


def _larger(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return torch.maximum(one, other)


def _rows(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return torch.cat((one, other))[:SAMPLE_ROWS]


def _joined(rows: list[Tensor]) -> Tensor | None:
    return torch.cat(rows) if rows else None
