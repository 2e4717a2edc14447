"""One layer's shard and its part of the report: each weight quantised, all else copied."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from hmt.base.errors import NumericsError
from hmt.contracts.blocks import TRUNK, BlockKind
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.contracts.store import Weights
from hmt.quant.methods.interface import Method, QuantizedWeight, Statistics
from hmt.quant.repacking.bits import DTYPES
from hmt.quantizing.changes import Changes
from hmt.quantizing.folder import PartialFolder
from hmt.quantizing.memory_plan import by_rows
from hmt.quantizing.methods import open_method
from hmt.quantizing.published import encoded, sizes
from hmt.quantizing.report import Error, entry_of, error_of
from hmt.quantizing.rounded_weights import weight_rows
from hmt.quantizing.shards import Entries, ShardWriter, bytes_of, file_bytes
from hmt.quantizing.source_tensors import PIECE_BYTES, pieces, tensor
from hmt.quantizing.source_tensors import numbers as published_numbers
from hmt.quantizing.statistics import Collector, of_all
from hmt.quantizing.structure import ParamId
from hmt.quantizing.units import LayerWork, Unit

_FEW: Final = 4  # an expert with fewer tokens than a quarter of its inputs takes others' statistics
_SCALES: Final = "_scale_inv"

Found = Mapping[ParamId, Collector]


class LayerWriter:
    """Writes what `work` lists; a context, in which it is finished or left."""

    def __init__(
        self, shard: Path, report: Path, work: LayerWork, checkpoint: Checkpoint, changes: Changes
    ) -> None:
        """Begin the file `shard`, and of `report` what is said.  Raises DiskWriteError."""
        self._work, self._checkpoint, self._report_file = work, checkpoint, report
        self._changes = changes
        self._lines: list[dict[str, Any]] = []
        self._nearest = open_method("rtn")
        self._shard = ShardWriter(shard, entries(work))

    def __enter__(self) -> "LayerWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shard.close()

    def add(self, unit: Unit, weights: Weights, method: Method, found: Found) -> None:
        """Quantise a weight and write it.

        found   statistics of inputs, of this unit and others; nothing where none are needed
        Raises NumericsError where it holds NaN or infinite numbers, or the method makes some.
        """
        method, inputs, note = self._chosen(unit, method, found)
        parts: list[QuantizedWeight] = []
        nearest, error = Error(), Error()
        changed = any(place in self._changes for place in unit.places)
        apart = by_rows(unit, method.needs) and not changed
        for rows in weight_rows(unit, weights, self._changes, apart=apart):
            _check_finite(unit, rows)
            made = _as_stored(method.quantize(rows, inputs, unit.target), unit)
            parts.append(made)
            own = error_of(rows, made, inputs.hessian)
            error += own
            if method.needs:
                plain = self._nearest.quantize(rows, Statistics(0), unit.target)
                plain = _as_stored(plain, unit)
                own = error_of(rows, plain, inputs.hessian)
            nearest += own
        whole = _joined(parts)
        if not error.lost < float("inf"):
            raise NumericsError(f"{unit.module} has no finite numbers once it is quantised")
        for suffix, numbers in encoded(whole, DTYPES[unit.scales]).items():
            self._shard.write(f"{unit.module}.{suffix}", numbers)
        tokens = found[unit.input].tokens if found else None
        self._lines.append(entry_of(unit, tokens, nearest, error, note))

    def _chosen(self, unit: Unit, method: Method, found: Found) -> tuple[Method, Statistics, str]:
        """The method for a weight, what it is told, and what of that is unusual."""
        if not found:
            return method, Statistics(0), ""
        inputs = found[unit.input].result()
        if unit.input.block.kind is not BlockKind.EXPERT:
            if inputs.tokens:
                return method, inputs, ""
            return self._nearest, inputs, "its input was not seen: rounded to nearest"
        few = max(1, unit.shape[1] // _FEW)
        if inputs.tokens >= few:
            return method, inputs, ""
        seen = f"{inputs.tokens} tokens came to this expert, fewer than {few}"
        if unit.input.name == "down_proj":  # whose inputs are other neurons in each expert
            return self._nearest, inputs, f"{seen}: rounded to nearest"
        alike = [c for place, c in found.items() if _alike(place, unit.input)]
        everyone = of_all(collector.result() for collector in alike)
        if everyone.tokens < few:
            return self._nearest, inputs, f"{seen}: rounded to nearest"
        return method, everyone, f"{seen}: statistics of the layer"

    def finish(self, folder: PartialFolder) -> None:
        """Copy all else, and let the report's part and the shard appear.  Raises DiskWriteError."""
        for record in self._work.copied:
            self._copy(record)
        folder.write_file(self._report_file, json.dumps(self._lines).encode())
        self._shard.finish()

    def _copy(self, record: TensorRecord) -> None:
        places = self._work.places.get(record.name, ())
        if any(place in self._changes for place in places):
            self._write_changed(record, places)
            return
        if record.dtype == "F8_E4M3":
            self._shard.write(record.name, self._numbers(record))
            return
        for at, content in pieces(record):
            self._shard.write_bytes(record.name, at, content)

    def _write_changed(self, record: TensorRecord, places: Sequence[ParamId]) -> None:
        """A tensor of parameters of which something becomes before all else is written."""
        if self._work.index != TRUNK or record.dtype == "F8_E4M3":
            if record.dtype == "F8_E4M3":
                numbers = self._numbers(record)
            else:
                numbers = published_numbers(record)
            if len(places) > 1:
                raise AssertionError(f"{record.name} is several parameters")
            changed = self._changes.of(places[0], numbers.float())
            self._shard.write(record.name, changed.to(numbers.dtype))
            return
        # Rows of the embedding and the output layer become others each by itself.
        row_bytes = record.nbytes // record.shape[0]
        step = max(1, PIECE_BYTES // row_bytes) if len(record.shape) > 1 else record.shape[0]
        for first in range(0, record.shape[0], step):
            part = record.rows(first, min(step, record.shape[0] - first))
            numbers = tensor(part, DTYPES[record.dtype])
            changed = self._changes.of(places[0], numbers.float()).to(numbers.dtype)
            self._shard.write_bytes(record.name, first * row_bytes, bytes_of(changed))

    def _numbers(self, record: TensorRecord) -> Tensor:
        """FP8 in tiles as bf16: exact but for the product's rounding."""
        scales = self._checkpoint.records[record.name + _SCALES]
        tile = self._checkpoint.fp8_tile
        assert tile is not None
        codes = tensor(record, torch.float8_e4m3fn)
        factors = tensor(scales, torch.float32)
        out = torch.empty(record.shape, dtype=torch.bfloat16)
        for start in range(0, record.shape[0], tile[0]):
            rows = slice(start, start + tile[0])
            by = factors[start // tile[0]].repeat_interleave(tile[1])[: record.shape[1]]
            out[rows] = codes[rows].float() * by
        return out


def entries(work: LayerWork) -> Entries:
    """The tensors of a layer's shard."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for unit in work.units:
        published = sizes(unit.target, unit.shape, unit.scales)
        found |= {f"{unit.module}.{suffix}": entry for suffix, entry in published.items()}
    for record in work.copied:
        dtype = "BF16" if record.dtype == "F8_E4M3" else record.dtype
        found[record.name] = (dtype, record.shape)
    return found


def shard_bytes(work: LayerWork) -> int:
    """What a layer's shard takes."""
    return file_bytes(entries(work))


def _alike(place: ParamId, other: ParamId) -> bool:
    return place.block.kind is BlockKind.EXPERT and place.name == other.name


def _as_stored(made: QuantizedWeight, unit: Unit) -> QuantizedWeight:
    """With scales of integers as they will be read, in 16 bits where the checkpoint has these.

    At 8 bits that adds 3% to the squared error of rounding, at 4 bits nothing that is seen.
    """
    if unit.target.kind != "int":
        return made
    return replace(made, scales=made.scales.to(DTYPES[unit.scales]).float())


def _check_finite(unit: Unit, rows: Tensor) -> None:
    if not torch.isfinite(rows.abs().amax()):
        raise NumericsError(
            f"{unit.module} holds NaN or infinite numbers, which cannot be quantised: download the "
            "checkpoint again"
        )


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Rows that were quantised apart."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zero_points=torch.cat(zeros) if zeros else None,
    )
