"""Hidden states of the calibration sequences between layers, on disk."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hmt.base.errors import DiskReadError, os_reason
from hmt.base.folders import sync_folder, writing
from hmt.contracts.model import Model
from hmt.contracts.step import SegmentRequest, Step
from hmt.contracts.store import Weights
from hmt.quantizing.observed import Observer, observed
from hmt.quantizing.shards import bytes_of, read_at, sync_and_forget, write_at
from hmt.quantizing.whole_sequences import WholeSequences


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences that are computed in one step, and the first of their rows in a file."""

    first: int
    step: Step


class HiddenStates:
    """What goes into each layer for all calibration sequences: f32 [tokens, width] in a file each.

    batch   sequences of a step
    """

    def __init__(
        self,
        model: Model,
        sequences: Sequence[Sequence[int]],
        folder: Path,
        batch: int,
        where: torch.device,
    ) -> None:
        """Files are in `folder`; nothing is computed yet.  The device `where` will do it."""
        self._model, self._folder, self._where = model, folder, where
        self._batches = list(_batches(sequences, batch, where))
        self.tokens = sum(map(len, sequences))

    def file(self, layer: int) -> Path:
        """What goes into `layer`."""
        return self._folder / f"hidden-{layer:05}.f32"

    @property
    def steps(self) -> int:
        """Steps of a layer over all sequences."""
        return len(self._batches)

    def of_sequence(self, layer: int, first: int, count: int) -> Tensor:
        """`count` rows of what goes into `layer`, from row `first` on: f32 [count, width].

        Rows of all sequences lie one behind the other.
        """
        file = self.file(layer)
        try:
            with file.open("rb", buffering=0) as opened:
                width = file.stat().st_size // self.tokens // 4
                rows = torch.empty(count, width)
                read_at(opened.fileno(), bytes_of(rows), 4 * first * width)
                return rows
        except OSError as error:
            raise DiskReadError(f"{file} cannot be read: {os_reason(error)}") from error

    def embed(self, weights: Weights) -> None:
        """Make what goes into the first layer.  Raises DiskWriteError."""

        def compute(batch: _Batch, hidden: Tensor | None) -> Tensor:
            return self._model.embed(batch.step, weights)

        self._make(0, compute)

    def advance(self, layer: int, weights: Weights, done: Callable[[], None]) -> None:
        """Make what goes into the layer behind `layer`, and remove what went into this one.

        done   is called after each step
        """

        def compute(batch: _Batch, hidden: Tensor | None) -> Tensor:
            assert hidden is not None
            out = self._layer(layer, hidden, batch.step, weights)
            done()
            return out

        with observed(None, self._where):
            self._make(layer + 1, compute)
        self.file(layer).unlink(missing_ok=True)

    def observe(
        self, layer: int, weights: Weights, observer: Observer, done: Callable[[], None]
    ) -> None:
        """Compute `layer` for all sequences, and let `observer` hear of it."""
        with observed(observer, self._where), torch.inference_mode():
            for batch, hidden in self._inputs(layer):
                self._layer(layer, hidden, batch.step, weights)
                done()

    def samples(self, layer: int, most: int) -> Iterator[tuple[Tensor, Step]]:
        """What goes into `layer` in up to `most` of its steps, from all over the sequences."""
        count = min(most, len(self._batches))
        wanted = {number * len(self._batches) // count for number in range(count)}
        for number, (batch, hidden) in enumerate(self._inputs(layer)):
            if number in wanted:
                yield hidden, batch.step

    def output(self, layer: int, hidden: Tensor, step: Step, weights: Weights) -> Tensor:
        """What comes out of `layer` for inputs that `samples` gave."""
        with observed(None, self._where), torch.inference_mode():
            return self._layer(layer, hidden, step, weights)

    def _layer(self, layer: int, hidden: Tensor, step: Step, weights: Weights) -> Tensor:
        return self._model.layer(layer, hidden, step, weights, WholeSequences(self._model.spec))

    def _inputs(self, layer: int) -> Iterator[tuple[_Batch, Tensor]]:
        file = self.file(layer)
        try:
            row_bytes = file.stat().st_size // self.tokens
            with file.open("rb", buffering=0) as opened:
                for batch in self._batches:
                    rows = len(batch.step.token_ids)
                    hidden = torch.empty(rows, row_bytes // 4)
                    read_at(opened.fileno(), bytes_of(hidden), batch.first * row_bytes)
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    yield batch, hidden.to(self._where)
        except OSError as error:
            raise DiskReadError(f"{file} cannot be read: {os_reason(error)}") from error

    @torch.inference_mode()
    def _make(self, layer: int, compute: Callable[[_Batch, Tensor | None], Tensor]) -> None:
        """Write the file of `layer`, which is there whole or not at all."""
        file = self.file(layer)
        partial = file.with_suffix(".partial")
        given = self._inputs(layer - 1) if layer else ((batch, None) for batch in self._batches)
        with writing(f"writing {partial}"):
            opened = partial.open("wb", buffering=0)
        with opened:
            for batch, hidden in given:
                out = compute(batch, hidden).float().cpu().contiguous()
                with writing(f"writing {partial}"):
                    write_at(opened.fileno(), bytes_of(out), batch.first * out.shape[1] * 4)
                    sync_and_forget(opened.fileno())
        with writing(f"writing {file}"):
            partial.rename(file)
            sync_folder(self._folder)


def _batches(
    sequences: Sequence[Sequence[int]], batch: int, where: torch.device
) -> Iterator[_Batch]:
    first = 0
    for start in range(0, len(sequences), batch):
        some = sequences[start : start + batch]
        parts = [
            SegmentRequest(number, 0, list(text), 0, len(text), whole=len(text))
            for number, text in enumerate(some)
        ]
        step = Step.build(parts)
        yield _Batch(first, _on_device(step, where))
        first += len(step.token_ids)


def _on_device(step: Step, where: torch.device) -> Step:
    """A step of tokens alone, of which nothing else is looked at."""
    return replace(
        step,
        token_ids=step.token_ids.to(where),
        positions=step.positions.to(where),
        logit_rows=step.logit_rows.to(where),
    )
