"""A pass over the layers before any is quantised: what fewer bits would do to each weight.

Layers compute with the weights as published.  A weight's error is that of its outputs for some of
its inputs, once it is rounded to the nearest; what such an error does to what comes out of the
layer is measured by rounding all weights of that name in the layer at once.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hmt.base.folders import writing
from hmt.memory import Ledger
from hmt.quant.methods.interface import Statistics, Target
from hmt.quantizing.changes import Changes
from hmt.quantizing.folder import PartialFolder
from hmt.quantizing.hidden_states import HiddenStates
from hmt.quantizing.job import Job
from hmt.quantizing.layer_run import Progress
from hmt.quantizing.measures import (
    SampledInputs,
    Sensitivity,
    divergence,
    energy,
    sampled_bytes,
    spread,
)
from hmt.quantizing.memory_plan import ROWS_NUMBERS, MemoryPlan, groups_within, layer_layouts
from hmt.quantizing.methods import open_method
from hmt.quantizing.observed import Observer
from hmt.quantizing.rounded_weights import RoundedWeights, weight_rows
from hmt.quantizing.scaling import layer_changes
from hmt.quantizing.stores import LayerWeights, open_store
from hmt.quantizing.structure import ParamId
from hmt.quantizing.units import LayerWork, Unit
from hmt.weights import WeightStore

_MEASURING: Final = "measuring"
_ERROR_ROWS: Final = 512  # of inputs that errors are measured for
_STEPS: Final = 4  # steps of a layer that the effect of errors is measured in
_REFERENCE_BITS: Final = 4  # at which it is


@dataclass(frozen=True, slots=True)
class Measured:
    """One weight.

    losses        by bits: the relative squared error of the layer's output that it would cause
    tokens        that its input was seen for
    sensitivity   at the bits that were asked for; None where it was not, or no token came
    """

    module: str
    losses: Mapping[int, float]
    tokens: int
    sensitivity: Sensitivity | None


class MeasureRun:
    """Measures all weights of a job, from where an earlier run has stopped."""

    def __init__(
        self,
        job: Job,
        plan: MemoryPlan,
        folder: PartialFolder,
        ledger: Ledger,
        progress: Progress,
    ) -> None:
        self._job, self._plan, self._folder = job, plan, folder
        self._ledger, self._progress = ledger, progress
        self._hidden_folder = folder.work / "measuring"
        self._hidden = HiddenStates(
            job.model, job.sequences, self._hidden_folder, max(1, plan.batch), job.where
        )
        self._works = [work for work in job.works if work.units]
        self._nearest = open_method("rtn")

    def run(self) -> dict[str, Measured]:
        """What was measured, by module.  Raises DiskReadError, DiskWriteError, NumericsError."""
        with writing(f"making {self._hidden_folder}"):
            self._hidden_folder.mkdir(exist_ok=True)
        found: dict[str, Measured] = {}
        with self._plan.charged(self._ledger):
            for number in range(self._job.model.spec.layers):
                self._layer(self._job.works[number])
                self._progress(_MEASURING, number + 1, self._job.model.spec.layers)
                found |= _read(self._file(number))
        shutil.rmtree(self._hidden_folder, ignore_errors=True)
        return found

    def _file(self, layer: int) -> Path:
        return self._folder.work / f"measured-{layer:05}.json"

    def _layer(self, work: LayerWork) -> None:
        layer, last = work.index, self._job.model.spec.layers - 1
        behind = layer == last or any(
            file.exists() for file in (self._file(layer + 1), self._hidden.file(layer + 1))
        )
        if self._file(layer).exists() and behind:
            return
        layouts = layer_layouts(self._job.layouts, layer, tables=True)
        with open_store(layouts, self._ledger) as store:
            changes = layer_changes(self._job, layer, store)
            if not self._file(layer).exists():
                if layer == 0 and not self._hidden.file(0).exists():
                    self._hidden.embed(LayerWeights(store, changes=changes))
                lines = [asdict(line) for line in self._measured(work, store, changes)]
                self._folder.write_file(self._file(layer), json.dumps(lines).encode())
            if not behind:
                self._hidden.advance(layer, LayerWeights(store, changes=changes), lambda: None)

    def _measured(self, work: LayerWork, store: WeightStore, changes: Changes) -> list[Measured]:
        found: list[Measured] = []
        for group in groups_within(work, self._plan.statistics, sampled_bytes):
            inputs = self._inputs(work, group, store, changes)
            for unit in group:
                found.append(self._unit(unit, inputs[unit.input], store, changes))
        if not self._job.options.target_bytes:
            return found
        return self._weighted(work, store, changes, found)

    def _inputs(
        self, work: LayerWork, group: Sequence[Unit], store: WeightStore, changes: Changes
    ) -> dict[ParamId, SampledInputs]:
        steps = self._hidden.steps
        where = self._job.where
        found = {unit.input: SampledInputs(unit.shape[1], steps, where) for unit in group}
        observer = Observer(found.__contains__, lambda place, inputs: found[place].add(inputs))
        weights = LayerWeights(store, observer=observer, changes=changes)
        self._hidden.observe(work.index, weights, observer, lambda: None)
        return found

    def _unit(
        self, unit: Unit, inputs: SampledInputs, store: WeightStore, changes: Changes
    ) -> Measured:
        """Squared errors of outputs, not weighted yet, and the sensitivity."""
        options, rows = self._job.options, inputs.rows()
        (weight,) = weight_rows(unit, store, changes, apart=False)
        some = rows[:: -(-len(rows) // _ERROR_ROWS) or 1]
        losses: dict[int, float] = {}
        if options.target_bytes:
            for bits in sorted({*options.widths, unit.target.bits, _REFERENCE_BITS}):
                losses[bits] = self._error(weight, some, replace(unit.target, bits=bits))
        sensitivity = None
        if options.sensitivity and len(rows):
            before = rows @ weight.T
            after = rows @ self._rounded(weight, unit.target).T
            sensitivity = Sensitivity(divergence(before, after), spread(before), energy(weight))
        return Measured(unit.module, losses, inputs.tokens, sensitivity)

    def _error(self, weight: Tensor, rows: Tensor, target: Target) -> float:
        lost = 0.0
        for some in torch.split(weight, max(1, ROWS_NUMBERS // weight.shape[1])):
            difference = self._rounded(some, target).sub_(some)
            lost += float((rows @ difference.T).square().sum(dtype=torch.float64))
        return lost

    def _rounded(self, weight: Tensor, target: Target) -> Tensor:
        return self._nearest.quantize(weight, Statistics(0), target).dequantized()

    def _weighted(
        self, work: LayerWork, store: WeightStore, changes: Changes, found: Sequence[Measured]
    ) -> list[Measured]:
        """With errors as shares of the layer's output."""
        names: dict[tuple[object, str], list[int]] = {}
        for number, unit in enumerate(work.units):
            names.setdefault((unit.input.block.kind, unit.places[0].name), []).append(number)
        members_of = [list(members) for members in names.values()]
        effects = self._effects(work, store, changes, members_of)
        weighted = list(found)
        for members, effect in zip(names.values(), effects, strict=True):
            whole = sum(found[number].losses[_REFERENCE_BITS] for number in members)
            for number in members:
                losses = {
                    bits: effect * lost / whole if whole else 0.0
                    for bits, lost in found[number].losses.items()
                }
                weighted[number] = replace(found[number], losses=losses)
        return weighted

    def _effects(
        self,
        work: LayerWork,
        store: WeightStore,
        changes: Changes,
        groups: Sequence[Sequence[int]],
    ) -> list[float]:
        """Mean over tokens of the output's relative squared error, each group of units rounded."""
        plain = LayerWeights(store, changes=changes)
        rounded = []
        for members in groups:
            units = [work.units[number] for number in members]
            targets = {
                place: replace(unit.target, bits=_REFERENCE_BITS)
                for unit in units
                for place in unit.places
            }
            rounded.append(RoundedWeights(store, targets, self._rounded, changes))
        lost, tokens = [0.0] * len(groups), 0
        for hidden, step in self._hidden.samples(work.index, _STEPS):
            before = self._hidden.output(work.index, hidden.clone(), step, plain).float()
            norms = before.square().sum(1).clamp_min(1e-30)
            tokens += len(before)
            for number, weights in enumerate(rounded):
                after = self._hidden.output(work.index, hidden.clone(), step, weights).float()
                lost[number] += float(((after - before).square().sum(1) / norms).sum())
        return [value / max(1, tokens) for value in lost]


def _read(file: Path) -> dict[str, Measured]:
    found = {}
    for line in json.loads(file.read_bytes()):
        losses = {int(bits): loss for bits, loss in line["losses"].items()}
        sensitivity = line["sensitivity"]
        found[line["module"]] = Measured(
            line["module"],
            losses,
            line["tokens"],
            None if sensitivity is None else Sensitivity(**sensitivity),
        )
    return found
