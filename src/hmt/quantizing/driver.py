"""Quantising a checkpoint layer by layer, in bounded memory, resumable after a kill.

Where sensitivity or bits are to be found, a pass over the layers measures all weights before.
Each layer's weights are leased and quantised one by one, and written as one shard.  A method that
wants to know inputs sees those of the calibration sequences: before it is quantised the layer
computes them from hidden states on disk; what goes into the next layer is computed with the weights
that were written, so that later layers make up for the errors of earlier ones (GPTQ, arXiv
2210.17323).
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hmt.base.units import MIB
from hmt.contracts.plan import Tier
from hmt.engine.loading.device import device_budget
from hmt.memory import Ledger
from hmt.memory.device import open_device
from hmt.quant.sensitive import SENSITIVE_FILE, sensitive_entries
from hmt.quantizing.deciding import Decision, check_size, decide
from hmt.quantizing.folder import REPORT, PartialFolder
from hmt.quantizing.job import Job, prepare, with_forms
from hmt.quantizing.layer_run import LayerRun, Progress
from hmt.quantizing.layer_writer import shard_bytes
from hmt.quantizing.measuring import MeasureRun
from hmt.quantizing.memory_plan import MemoryPlan, plan_memory
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.units import LayerWork, Unit


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


def quantize(
    model: Path,
    out: Path,
    options: QuantizeOptions,
    *,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Quantized:
    """Quantise the checkpoint in folder `model`, as a compressed-tensors folder `out`.

    Memory for weights, statistics and activations stays within the options' budgets.  What an
    earlier call with the same options has written before it was ended is gone on with.
    `progress(what, done, of so many)` is told of work in bytes of weights; what it raises ends it.

    Raises ConfigError where `out` cannot be or exists (with `force` a model that this made is
    replaced, once the new one is complete) or options cannot be met, BudgetError where the budget
    is too small, MachineError where the GPU cannot be used, CheckpointError, DiskReadError,
    DiskWriteError and NumericsError.
    """
    with ExitStack() as stack:
        gpu = None
        if options.gpu is not None:
            gpu = open_device(options.gpu)
            stack.callback(gpu.close)
        budgets = {Tier.HOST: options.host_memory_bytes}
        if gpu is None:
            job = prepare(model, options)
        else:
            job = prepare(model, options, gpu.where, gpu.name)
        check_size(job)
        if gpu is not None:
            # Behind the engine, which may have written the calibration's text there.
            budgets[Tier.DEVICE] = device_budget(gpu, options.gpu_memory_bytes)
            stack.enter_context(gpu.compute_stream())
            stack.enter_context(gpu.limited(budgets[Tier.DEVICE]))
        folder = PartialFolder(out, job.identity(), force=force)
        stack.callback(folder.close)
        plan = _planned(job, folder, budgets.get(Tier.DEVICE))
        folder.check_room(_room(job))
        ledger = Ledger(budgets)
        if options.measures:
            decision = decide(job, MeasureRun(job, plan, folder, ledger, progress).run())
            report = _as_decided(job, decision, plan, folder, ledger, progress)
        else:
            report = LayerRun(job, plan, folder, ledger, progress).run()
        written = sum(file.stat().st_size for file in folder.model.glob("*.safetensors"))
        folder.publish()
    read = sum(record.nbytes for record in job.checkpoint.records.values())
    return Quantized(report, read, written, job.tokens, plan)


def _as_decided(
    job: Job,
    decision: Decision,
    plan: MemoryPlan,
    folder: PartialFolder,
    ledger: Ledger,
    progress: Progress,
) -> dict[str, Any]:
    """Quantise in the forms that were chosen; the report."""
    decided = with_forms(job, decision.chosen)
    folder.check_room(_room(decided))
    report = LayerRun(decided, plan, folder, ledger, progress).run()
    report |= decision.as_json() | {"calibration_tokens": job.tokens}
    folder.write_file(folder.model / REPORT, json.dumps(report, indent=1).encode())
    if job.options.sensitivity:
        entries = sensitive_entries(job.checkpoint.path) + [dict(e) for e in decision.sensitive]
        folder.write_file(folder.model / SENSITIVE_FILE, json.dumps(entries, indent=1).encode())
    return report


def _planned(job: Job, folder: PartialFolder, device: int | None) -> MemoryPlan:
    """Shares of the budgets; those of an earlier run where this one goes on for it."""
    before = None if folder.begun is None else MemoryPlan(**folder.begun)
    plan = plan_memory(
        job.options.host_memory_bytes,
        job.model.spec,
        job.layouts,
        _largest(job),
        job.procedure,
        job.sequences,
        before,
        measures=job.options.measures,
        device=device,
    )
    if before is None:
        folder.remember(asdict(plan))
    return plan


def _room(job: Job) -> int:
    """What the result takes on disk, and hidden states in front of a layer and behind it."""
    hidden = 4 * job.model.spec.hidden_size * job.tokens
    tensors = job.options.target_bytes or sum(map(shard_bytes, job.works))
    return tensors + 2 * hidden + MIB


def _largest(job: Job) -> list[LayerWork]:
    """Work as it takes most memory, where bits are still to be chosen."""
    if job.options.target_bytes is None:
        return job.works
    most = max(job.options.widths)

    def widened(unit: Unit) -> Unit:
        return replace(unit, target=replace(unit.target, bits=max(unit.target.bits, most)))

    return [replace(work, units=tuple(map(widened, work.units))) for work in job.works]
