"""Quantising a checkpoint layer by layer, in bounded memory, resumable after a kill.

Each layer's weights are leased and quantised one by one, and written as one shard.  A method that
wants to know inputs sees those of the calibration texts: the layer computes them from hidden states
on disk, before it is quantised; what goes into the next layer is computed with the weights that
were written, so that later layers make up for the errors of earlier ones (GPTQ, arXiv 2210.17323).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from hmt.base.errors import CheckpointError, ConfigError
from hmt.base.trace import Tracer
from hmt.base.units import MIB
from hmt.contracts.blocks import TRUNK, BlockId
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.model import Model
from hmt.contracts.plan import Tier
from hmt.engine import EngineConfig
from hmt.engine.loading.disk import transfer_queue
from hmt.engine.loading.source import open_source, sensitive_of, target
from hmt.formats.quantized import find_forms
from hmt.formats.safetensors import read_header
from hmt.memory import Ledger, ReadQueue
from hmt.models import open_model
from hmt.quant import Scheme
from hmt.quant.methods.interface import Method
from hmt.quantizing.calibration_text import BUILTIN, sequences
from hmt.quantizing.finishing import copied_files, finish, identity
from hmt.quantizing.folder import PartialFolder
from hmt.quantizing.hidden_states import HiddenStates
from hmt.quantizing.layer_writer import LayerWriter, shard_bytes
from hmt.quantizing.memory_plan import (
    Layouts,
    MemoryPlan,
    layer_layouts,
    plan_memory,
    statistics_groups,
)
from hmt.quantizing.methods import open_method
from hmt.quantizing.observed import Observer
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.published import quantization_config
from hmt.quantizing.statistics import Collector
from hmt.quantizing.stores import LayerWeights, open_store
from hmt.quantizing.structure import Place
from hmt.quantizing.units import LayerWork, Unit, plan_work
from hmt.weights import bind, lay_out

Progress = Callable[[str, int, int], None]

_WORKING: Final = "quantising"


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model that was quantised.

    report          what the folder's quantization_report.json says
    read_bytes      of the checkpoint
    written_bytes   of the folder's tensors
    tokens          of calibration; 0: none was read
    plan            how memory was shared
    """

    report: Mapping[str, Any]
    read_bytes: int
    written_bytes: int
    tokens: int
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class _Job:
    """What is quantised, and with what; nothing is computed yet."""

    checkpoint: Checkpoint
    model: Model
    layouts: Layouts
    works: list[LayerWork]
    method: Method
    texts: list[list[int]]
    options: QuantizeOptions
    section: Mapping[str, Any]  # of the new config.json


def quantize(
    model: Path,
    out: Path,
    options: QuantizeOptions,
    *,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Quantized:
    """Quantise the checkpoint in folder `model`, as a compressed-tensors folder `out`.

    Memory for weights, statistics and activations stays within the options' budget.  What an
    earlier call with the same options has written before it was ended is gone on with.
    `progress(what, done, of so many)` is told of work in bytes of weights; what it raises ends it.

    Raises ConfigError where `out` cannot be or exists (with `force` a model that this made is
    replaced, once the new one is complete) or options cannot be met, BudgetError where the budget
    is too small, CheckpointError, DiskReadError, DiskWriteError and NumericsError.
    """
    job = _prepare(model, options)
    with ExitStack() as stack:
        folder = PartialFolder(out, _identity(job), force=force)
        stack.callback(folder.close)
        plan = _planned(job, folder)
        folder.check_room(_room(job))
        ledger = Ledger({Tier.HOST: options.host_memory_bytes})
        report = _Run(job, plan, folder, ledger, progress).run()
        written = sum(file.stat().st_size for file in folder.model.glob("*.safetensors"))
        folder.publish()
    read = sum(record.nbytes for record in job.checkpoint.records.values())
    return Quantized(report, read, written, sum(map(len, job.texts)), plan)


def _prepare(path: Path, options: QuantizeOptions) -> _Job:
    source = open_source(path)
    if source.pack is not None:
        raise CheckpointError(f"{path} is a pack: quantise the checkpoint that it was made of")
    checkpoint = source.checkpoint
    method = open_method(options.method)
    model = open_model(checkpoint.config, checkpoint.path, torch.float32)
    bound = bind(model.spec, checkpoint)
    layouts = lay_out(bound, target(Scheme()))
    works = plan_work(
        model.spec, checkpoint, bound, sensitive_of(checkpoint.path, model.spec), options
    )
    texts: list[list[int]] = []
    if not method.needs and options.calibration != BUILTIN:
        raise ConfigError(
            f"--method {options.method} reads no text: leave --calibration {options.calibration} "
            "out, or choose another method"
        )
    if method.needs:
        if model.spec.kv_sources:
            raise ConfigError(
                f"layers of {path} use keys and values of earlier ones, which calibration does not "
                "keep: --method rtn needs none"
            )
        length = min(options.length, model.spec.max_context)
        texts = sequences(options.calibration, source.tokenizer(), options.sequences, length)
    modules = {unit.module: unit.target for work in works for unit in work.units}
    section = quantization_config(modules, (name for work in works for name in work.ignored))
    return _Job(checkpoint, model, layouts, works, method, texts, options, section)


def _identity(job: _Job) -> dict[str, Any]:
    """What two runs must share for one to go on with what the other has written."""
    own = dict(job.options.identity())
    del own["host_memory_bytes"]  # see `_planned`
    return own | identity(job.checkpoint, job.texts)


def _planned(job: _Job, folder: PartialFolder) -> MemoryPlan:
    """Shares of the budget; those of an earlier run where this one goes on for it."""
    before = None if folder.begun is None else MemoryPlan(**folder.begun)
    plan = plan_memory(
        job.options.host_memory_bytes,
        job.model.spec,
        job.layouts,
        job.works,
        job.method.needs,
        job.texts,
        before,
    )
    if before is None:
        folder.remember(asdict(plan))
    return plan


def _room(job: _Job) -> int:
    """What the result takes on disk, and hidden states in front of a layer and behind it."""
    hidden = 4 * job.model.spec.hidden_size * sum(map(len, job.texts))
    return sum(map(shard_bytes, job.works)) + 2 * hidden + MIB


def _open_queue() -> ReadQueue:
    return transfer_queue(EngineConfig.resolve(), Tracer())


class _Run:
    """One quantisation, from where an earlier one has stopped."""

    def __init__(
        self,
        job: _Job,
        plan: MemoryPlan,
        folder: PartialFolder,
        ledger: Ledger,
        progress: Progress,
    ) -> None:
        self._job, self._plan, self._folder = job, plan, folder
        self._ledger, self._progress = ledger, progress
        self._hidden = HiddenStates(job.model, job.texts, folder.work, max(1, plan.batch))
        self._groups = [
            statistics_groups(work, job.method.needs, plan.statistics) for work in job.works
        ]
        self._done = 0
        self._total = sum(self._work_of(work, number) for number, work in enumerate(job.works))

    def _work_of(self, work: LayerWork, number: int) -> int:
        passes = 1 + (len(self._groups[number]) + 1 if self._job.texts else 0)
        return sum(2 * unit.numbers for unit in work.units) * passes

    def run(self) -> dict[str, Any]:
        """Everything but the last step; returns the report."""
        job = self._job
        with ExitStack() as stack:
            for purpose in ("work", "statistics", "activations"):  # torch's memory
                nbytes = getattr(self._plan, purpose)
                account = self._ledger.open(Tier.HOST, purpose, nbytes)
                stack.callback(account.close)
            for number, work in enumerate(job.works):
                before = self._done
                self._layer(number, work)
                self._advance_to(before + self._work_of(work, number))
        return finish(
            self._folder, job.checkpoint, job.works, job.section, copied_files(job.checkpoint),
            job.options, sum(map(len, job.texts)),
        )  # fmt: skip

    def _advance_to(self, done: int) -> None:
        self._done = done
        self._progress(_WORKING, done, self._total)

    def _layer(self, number: int, work: LayerWork) -> None:
        shard = self._folder.model / self._shard_name(number)
        if work.index == TRUNK:
            if not shard.exists():
                with LayerWriter(shard, self._report_file(number), work, self._job.checkpoint) as w:
                    w.finish(self._folder)
            return
        if not shard.exists():
            self._quantize(number, work, shard)
        if self._job.texts and self._wants_outputs(number, work):
            self._outputs(work, shard)

    def _wants_outputs(self, number: int, work: LayerWork) -> bool:
        """Whether the next layer is still to be quantised, and what goes into it is not there."""
        if work.index + 1 == self._job.model.spec.layers:
            return False
        behind = self._folder.model / self._shard_name(number + 1)
        return not behind.exists() and not self._hidden.file(work.index + 1).exists()

    def _shard_name(self, number: int) -> str:
        return f"model-{number + 1:05}-of-{len(self._job.works):05}.safetensors"

    def _report_file(self, number: int) -> Path:
        return self._folder.work / f"report-{number:05}.json"

    def _quantize(self, number: int, work: LayerWork, shard: Path) -> None:
        """Write the layer's shard."""
        job = self._job
        layouts = layer_layouts(job.layouts, work.index, tables=True)
        with (
            open_store(layouts, _open_queue, self._ledger) as store,
            LayerWriter(shard, self._report_file(number), work, job.checkpoint) as writer,
        ):
            if job.texts and work.index == 0 and not self._hidden.file(0).exists():
                self._hidden.embed(LayerWeights(store))
            for group in self._groups[number]:
                found = self._observe(work, group, store) if job.texts else {}
                for unit in group:
                    writer.add(unit, store, job.method, found)
                    self._advance_to(self._done + 2 * unit.numbers)
            writer.finish(self._folder)

    def _observe(
        self, work: LayerWork, group: Sequence[Unit], store: Any
    ) -> dict[Place, Collector]:
        """Statistics of the inputs of `group`, over all texts."""
        needs = self._job.method.needs
        found: dict[Place, Collector] = {}
        for unit in group:
            if unit.input not in found:
                found[unit.input] = Collector(needs, unit.shape[1])
        observer = Observer(found.__contains__, lambda place, inputs: found[place].add(inputs))
        weights = LayerWeights(store, observer=observer)
        self._hidden.observe(work.index, weights, observer, self._step_of(work))
        return found

    def _step_of(self, work: LayerWork) -> Callable[[], None]:
        share = sum(2 * unit.numbers for unit in work.units) // max(1, self._hidden.steps)
        return lambda: self._advance_to(self._done + share)

    def _outputs(self, work: LayerWork, shard: Path) -> None:
        """Make what goes into the next layer, with the weights that are in the shard."""
        spec = self._job.model.spec
        with ExitStack() as stack:
            store = stack.enter_context(
                open_store(self._written(work, shard), _open_queue, self._ledger)
            )
            tables = None
            if spec.row_lookups:
                trunk = layer_layouts(self._job.layouts, TRUNK, tables=True)
                tables = stack.enter_context(open_store(trunk, _open_queue, self._ledger))
            weights = LayerWeights(store, tables)
            self._hidden.advance(work.index, weights, self._step_of(work))

    def _written(self, work: LayerWork, shard: Path) -> Layouts:
        """The layer's blocks as they lie in its shard."""
        job = self._job
        config = {**job.checkpoint.config, "quantization_config": dict(job.section)}
        records = read_header(shard)
        forms = find_forms(shard.parent, config, None, records)
        written = replace(
            job.checkpoint, path=shard.parent, config=config, records=records, fp8_tile=None,
            forms=forms.forms, spare=frozenset(forms.spare),
        )  # fmt: skip
        blocks = tuple(block for block in job.model.spec.blocks if block.id.layer == work.index)
        bound = bind(replace(job.model.spec, blocks=blocks), written)
        found: dict[BlockId, Any] = lay_out(bound, target(Scheme()))
        return found
