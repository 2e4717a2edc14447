"""The loop over layers: collect statistics, quantise, compute what goes into the next one."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from hmt.contracts.blocks import TRUNK
from hmt.engine.drift import STATISTICS, WINDOW_TOKENS
from hmt.memory import Ledger
from hmt.quantizing.activation_statistics import write_statistics
from hmt.quantizing.changes import Changes
from hmt.quantizing.collecting import collect
from hmt.quantizing.finishing import copied_files, finish
from hmt.quantizing.folder import PartialFolder
from hmt.quantizing.hidden_states import HiddenStates
from hmt.quantizing.job import Job
from hmt.quantizing.layer_writer import LayerWriter
from hmt.quantizing.memory_plan import MemoryPlan, layer_layouts, statistics_groups
from hmt.quantizing.scaling import layer_changes, scale_layer, trunk_changes
from hmt.quantizing.stores import LayerWeights, open_store
from hmt.quantizing.units import LayerWork
from hmt.quantizing.written_layers import written_layouts

Progress = Callable[[str, int, int], None]

_WORKING: Final = "quantising"


class LayerRun:
    """One quantisation, from where an earlier one has stopped."""

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
        self._hidden = HiddenStates(
            job.model, job.sequences, folder.work, max(1, plan.batch), job.where
        )
        self._groups = [
            statistics_groups(work, job.procedure.method.needs, plan.statistics)
            for work in job.works
        ]
        self._done = 0
        self._total = sum(self._work_of(work, number) for number, work in enumerate(job.works))

    def _work_of(self, work: LayerWork, number: int) -> int:
        passes = 1 + (len(self._groups[number]) + 1 if self._job.sequences else 0)
        passes += self._job.procedure.scaling is not None
        return sum(2 * unit.numbers for unit in work.units) * passes

    def run(self) -> dict[str, Any]:
        """Everything but the last step; returns the report."""
        job = self._job
        with self._plan.charged(self._ledger):
            for number, work in enumerate(job.works):
                before = self._done
                self._layer(number, work)
                self._advance_to(before + self._work_of(work, number))
        report = finish(
            self._folder, job.checkpoint, job.works, job.section, job.config,
            copied_files(job.checkpoint), job.options, job.tokens,
        )  # fmt: skip
        if job.sequences:
            layers = job.model.spec.layers
            write_statistics(self._folder.model, self._hidden, job.sequences, layers)
        return report

    def _advance_to(self, done: int) -> None:
        self._done = done
        self._progress(_WORKING, done, self._total)

    def _layer(self, number: int, work: LayerWork) -> None:
        shard = self._folder.model / self._shard_name(number)
        if work.index == TRUNK:
            if not shard.exists():
                with self._writer(number, work, shard, trunk_changes(self._job)) as writer:
                    writer.finish(self._folder)
            return
        if not shard.exists():
            self._quantize(number, work, shard)
        if self._job.sequences and self._wants_outputs(number, work):
            self._outputs(work, shard)

    def _wants_outputs(self, number: int, work: LayerWork) -> bool:
        """Whether what goes into the next layer is missing, and is still to be looked at."""
        if self._hidden.file(work.index + 1).exists():
            return False
        if work.index + 1 == self._job.model.spec.layers:  # statistics are made of it
            long_enough = max(map(len, self._job.sequences)) >= WINDOW_TOKENS
            return long_enough and not (self._folder.model / STATISTICS).exists()
        return not (self._folder.model / self._shard_name(number + 1)).exists()

    def _shard_name(self, number: int) -> str:
        return f"model-{number + 1:05}-of-{len(self._job.works):05}.safetensors"

    def _report_file(self, number: int) -> Path:
        return self._folder.work / f"report-{number:05}.json"

    def _writer(self, number: int, work: LayerWork, shard: Path, changes: Changes) -> LayerWriter:
        report = self._report_file(number)
        return LayerWriter(shard, report, work, self._job.checkpoint, changes)

    def _quantize(self, number: int, work: LayerWork, shard: Path) -> None:
        """Write the layer's shard."""
        job = self._job
        method = job.procedure.method
        layouts = layer_layouts(job.layouts, work.index, tables=True)
        with open_store(layouts, self._ledger) as store:
            changes = layer_changes(job, work.index, store)
            if job.sequences and work.index == 0 and not self._hidden.file(0).exists():
                self._hidden.embed(LayerWeights(store, changes=changes))
            if job.procedure.scaling is not None:
                most, step = self._plan.statistics, self._step_of(work)
                scale_layer(job, work, most, self._hidden, store, changes, step)
            with self._writer(number, work, shard, changes) as writer:
                for group in self._groups[number]:
                    inputs = {unit.input: unit.shape[1] for unit in group} if method.needs else {}
                    found = collect(
                        self._hidden, work.index, inputs, method.needs, store, changes,
                        self._step_of(work),
                    )  # fmt: skip
                    for unit in group:
                        writer.add(unit, store, method, found)
                        self._advance_to(self._done + 2 * unit.numbers)
                writer.finish(self._folder)

    def _step_of(self, work: LayerWork) -> Callable[[], None]:
        share = sum(2 * unit.numbers for unit in work.units) // max(1, self._hidden.steps)
        return lambda: self._advance_to(self._done + share)

    def _outputs(self, work: LayerWork, shard: Path) -> None:
        """Make what goes into the next layer, with the weights that are in the shard."""
        spec = self._job.model.spec
        with ExitStack() as stack:
            store = stack.enter_context(
                open_store(written_layouts(self._job, work, shard), self._ledger)
            )
            tables = None
            if spec.row_lookups:
                trunk = layer_layouts(self._job.layouts, TRUNK, tables=True)
                tables = stack.enter_context(open_store(trunk, self._ledger))
            weights = LayerWeights(store, tables, changes=Changes(self._job.where))
            self._hidden.advance(work.index, weights, self._step_of(work))
