"""Training low-rank adapters of a checkpoint (LoRA, arXiv 2106.09685), resumable after a kill.

Weights stay as they are, and are leased block by block.  Adapters and AdamW's state are in memory.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from hmt.base.errors import CheckpointError, ConfigError, NumericsError
from hmt.contracts.model import Model
from hmt.contracts.plan import Tier
from hmt.engine.loading.source import Source, open_source, target
from hmt.finetuning.adapters import Adapters, Module, find_modules
from hmt.finetuning.differentiable import TrainingWeights, differentiable
from hmt.finetuning.examples import Example, Examples, batches, read_examples
from hmt.finetuning.gradients import Gradients
from hmt.finetuning.memory_plan import MemoryPlan, plan_memory
from hmt.finetuning.options import FinetuneOptions
from hmt.memory import Ledger
from hmt.models import open_model
from hmt.quant import Scheme
from hmt.quantizing import PartialFolder, open_store
from hmt.weights import bind, lay_out
from hmt.weights.checksum import as_text, checksum

REPORT: Final = "finetune_report.json"
_STATE: Final = "state.safetensors"
_SAVED_EVERY_S: Final = 30.0
_CLIPPED: Final = 1.0  # the most that the norm of all gradients may be, as Trainer of transformers

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Finetuned:
    """Adapters that were trained.

    losses     of each step, in nats per learned token
    examples   see Examples
    modules    that have adapters
    numbers    that were trained
    plan       how memory was shared
    """

    losses: Sequence[float]
    examples: Examples
    modules: Sequence[Module]
    numbers: int
    plan: MemoryPlan


def finetune(
    model: Path,
    out: Path,
    data: Path,
    options: FinetuneOptions,
    *,
    force: bool = False,
    progress: Progress = lambda step, steps, loss: None,
) -> Finetuned:
    """Train adapters of the checkpoint `model` with `data`, as a folder `out` that peft reads.

    Memory for weights, adapters and activations stays within the options' budget.  An earlier call
    with the same options that was ended is gone on with, from some steps before its end.
    `progress(step, of so many, its loss)` is told of each; what it raises ends the run.

    Raises ConfigError where `out` cannot be or exists (with `force` an earlier result is replaced),
    options cannot be met or nothing can be learned from `data`; BudgetError where the budget is
    too small; CheckpointError, DiskReadError, DiskWriteError, and NumericsError where a loss is no
    number.
    """
    source = open_source(model)
    if source.pack is not None:
        raise CheckpointError(f"{model} is a pack: train with the checkpoint that it was made of")
    opened = open_model(source.config, source.path, torch.float32)
    if opened.spec.kv_sources:
        raise ConfigError(
            f"layers of {model} share the KV cache of earlier ones, through which training passes "
            "no gradients"
        )
    modules = find_modules(opened.spec, frozenset(source.tensors), options.targets)
    length = min(options.length, opened.spec.max_context)
    examples = read_examples(data, source.tokenizer(), length)
    with ExitStack() as stack:
        folder = PartialFolder(
            out,
            _identity(source, examples, options),
            force=force,
            report=REPORT,
            made_by="hmt finetune",
        )
        stack.callback(folder.close)
        if folder.begun is None:
            folder.remember({})
        run = stack.enter_context(opened_run(source, opened, modules, examples, options))
        losses = run.train(folder, progress)
        for name, content in run.adapters.files(str(model)).items():
            folder.write_file(folder.model / name, content)
        report = {"options": dict(options.identity()), "losses": losses}
        folder.write_file(folder.model / REPORT, json.dumps(report, indent=1).encode())
        folder.publish()
    numbers = sum(module.numbers(options.rank) for module in modules)
    return Finetuned(losses, examples, modules, numbers, run.plan)


def _identity(source: Source, examples: Examples, options: FinetuneOptions) -> dict[str, Any]:
    """What the result depends on."""
    records = sorted((r.name, r.dtype, r.shape) for r in source.checkpoint.records.values())
    files = {record.file for record in source.checkpoint.records.values()}
    stats = {file.name: file.stat() for file in sorted(files)}
    read = [[*one.tokens, *map(int, one.learned)] for one in examples.all]
    return {
        **options.identity(),
        "model": source.path.resolve().name,
        "tensors": as_text(checksum(json.dumps(records).encode())),
        "tokens": as_text(checksum(json.dumps(read).encode())),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


@contextmanager
def opened_run(
    source: Source,
    model: Model,
    modules: Sequence[Module],
    examples: Examples,
    options: FinetuneOptions,
) -> Iterator["Run"]:
    """A run over all `examples`, with what it computes with until the context ends.

    The whole process computes in plain torch meanwhile.  Raises BudgetError.
    """
    layouts = lay_out(bind(model.spec, source.checkpoint), target(Scheme()))
    lengths = [len(one.tokens) for one in examples.all]
    plan = plan_memory(
        options.host_memory_bytes, model.spec, layouts, modules, options.rank, lengths,
        options.batch,
    )  # fmt: skip
    ledger = Ledger({Tier.HOST: options.host_memory_bytes})
    room = {"slots": plan.slots, "staging": plan.staging, "rows": plan.rows, "resident": 0}
    with plan.charged(ledger), open_store(layouts, ledger, room) as store, differentiable():
        adapters = Adapters(modules, options)
        gradients = Gradients(model, TrainingWeights(model.spec, store, adapters.trained()), plan)
        yield Run(adapters, gradients, examples.all, options, plan)


class Run:
    """Steps over all examples, and their state on the disk."""

    def __init__(
        self,
        adapters: Adapters,
        gradients: Gradients,
        examples: Sequence[Example],
        options: FinetuneOptions,
        plan: MemoryPlan,
    ) -> None:
        self.adapters, self.gradients, self.plan = adapters, gradients, plan
        self._examples, self._options = examples, options
        # The means of AdamW are tensors of their own; weight decay would pull what is added to
        # weights to zero, and not the weights themselves.
        self._optimizer = torch.optim.AdamW(
            adapters.parameters, lr=options.learning_rate, weight_decay=0.0
        )

    def train(self, folder: PartialFolder, progress: Progress) -> list[float]:
        """All steps, those that an earlier run has done excepted.  The losses of all."""
        options, state = self._options, folder.work / _STATE
        losses = self._restored(state) if state.exists() else []
        steps = [
            chosen
            for epoch in range(options.epochs)
            for chosen in batches(len(self._examples), options.batch, options.seed, epoch)
        ]
        saved_s = time.monotonic()
        for number, chosen in enumerate(steps[len(losses) :], len(losses)):
            losses.append(self._step([self._examples[n] for n in chosen], number))
            progress(number + 1, len(steps), losses[-1])
            if time.monotonic() - saved_s >= _SAVED_EVERY_S:
                folder.write_file(state, self._state(losses))
                saved_s = time.monotonic()
        return losses

    def _step(self, examples: Sequence[Example], number: int) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.gradients.add(examples)
        norm = torch.nn.utils.clip_grad_norm_(self.adapters.parameters, _CLIPPED)
        if not bool(torch.isfinite(norm)) or not abs(loss) < float("inf"):
            raise NumericsError(
                f"step {number + 1} has the loss {loss:g} and gradients of norm {float(norm):g}: "
                f"lower the learning rate, {self._options.learning_rate:g}"
            )
        self._optimizer.step()
        return loss

    def _state(self, losses: Sequence[float]) -> bytes:
        tensors: dict[str, Tensor] = {"losses": torch.tensor(losses, dtype=torch.float64)}
        for number, parameter in enumerate(self.adapters.parameters):
            tensors[f"{number}"] = parameter.detach()
            means: Mapping[str, Any] = self._optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq", "step"):
                tensors[f"{number}.{name}"] = means[name]
        return save(tensors)

    def _restored(self, file: Path) -> list[float]:
        """Take up the state of an earlier run; its losses."""
        with safe_open(file, "pt") as given:  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self.adapters.parameters):
                parameter.data.copy_(given.get_tensor(f"{number}"))
                self._optimizer.state[parameter] = {
                    name: given.get_tensor(f"{number}.{name}")
                    for name in ("exp_avg", "exp_avg_sq", "step")
                }
            losses: list[float] = given.get_tensor("losses").tolist()
        return losses
