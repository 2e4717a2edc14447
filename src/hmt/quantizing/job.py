"""What is quantised, and with what: everything that is known before the first weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.model import Model
from hmt.engine.loading.source import open_source, sensitive_of, target
from hmt.models import open_model
from hmt.quant import Scheme
from hmt.quant.methods.interface import Method, Target
from hmt.quantizing.calibration_text import BUILTIN, OWN, calibration_sequences
from hmt.quantizing.finishing import identity
from hmt.quantizing.memory_plan import Layouts
from hmt.quantizing.methods import open_method
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.own_text import own_sequences
from hmt.quantizing.published import quantization_config
from hmt.quantizing.units import LayerWork, plan_work
from hmt.weights import bind, lay_out


@dataclass(frozen=True, slots=True)
class Job:
    """One quantisation.

    works       by layer, the trunk's last
    sequences   token ids of calibration; none where inputs are not looked at
    section     `quantization_config` of the new config.json
    """

    checkpoint: Checkpoint
    model: Model
    layouts: Layouts
    works: list[LayerWork]
    method: Method
    sequences: list[list[int]]
    options: QuantizeOptions
    section: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.sequences))

    def identity(self) -> dict[str, Any]:
        """What two runs must share for one to go on with what the other has written."""
        own = dict(self.options.identity())
        del own["host_memory_bytes"]  # what of it counts is remembered: see `driver.py`
        return own | identity(self.checkpoint, self.sequences)


def prepare(path: Path, options: QuantizeOptions) -> Job:
    """What quantising the checkpoint in folder `path` is.  Raises CheckpointError, ConfigError."""
    source = open_source(path)
    if source.pack is not None:
        raise CheckpointError(f"{path} is a pack: quantise the checkpoint that it was made of")
    checkpoint = source.checkpoint
    method = open_method(options.method)
    model = open_model(checkpoint.config, checkpoint.path, torch.float32)
    bound = bind(model.spec, checkpoint)
    layouts = lay_out(bound, target(Scheme()))
    works = plan_work(
        model.spec, checkpoint, bound, sensitive_of(checkpoint.path, model.spec), options, {}
    )
    sequences: list[list[int]] = []
    reads_text = bool(method.needs) or options.measures
    if not reads_text and options.calibration != BUILTIN:
        raise ConfigError(
            f"--method {options.method} reads no text: leave --calibration {options.calibration} "
            "out, or choose another method"
        )
    if reads_text:
        if model.spec.kv_sources:
            raise ConfigError(
                f"layers of {path} share the KV cache of earlier ones, which calibration does not "
                "keep: --method rtn needs none, without --sensitivity and --target-size"
            )
        length = min(options.length, model.spec.max_context)
        count = options.sequences
        if options.calibration == OWN:
            sequences = own_sequences(path, count, length, options.host_memory_bytes)
        else:
            sequences = calibration_sequences(
                options.calibration, source.tokenizer(), count, length
            )
    return Job(checkpoint, model, layouts, works, method, sequences, options, _section(works))


def with_forms(job: Job, chosen: Mapping[str, Target | str]) -> Job:
    """The same with other forms of some modules, or reasons why they stay, once all is measured.

    Raises ConfigError where nothing would be quantised.
    """
    spec, checkpoint = job.model.spec, job.checkpoint
    works = plan_work(
        spec, checkpoint, bind(spec, checkpoint), sensitive_of(checkpoint.path, spec), job.options,
        chosen,
    )  # fmt: skip
    sequences = job.sequences if job.method.needs else []
    return replace(job, works=works, sequences=sequences, section=_section(works))


def _section(works: list[LayerWork]) -> Mapping[str, Any]:
    modules = {unit.module: unit.target for work in works for unit in work.units}
    return quantization_config(modules, (name for work in works for name in work.ignored))
