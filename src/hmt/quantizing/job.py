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
from hmt.quant.methods.interface import Target
from hmt.quantizing.calibration_text import BUILTIN, OWN, calibration_sequences
from hmt.quantizing.finishing import identity
from hmt.quantizing.memory_plan import Layouts
from hmt.quantizing.methods import Procedure, open_procedure
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.own_text import own_sequences
from hmt.quantizing.published import quantization_config
from hmt.quantizing.rotating import HiddenRotation, hidden_rotation
from hmt.quantizing.structure import FOLDABLE
from hmt.quantizing.units import LayerWork, plan_work
from hmt.weights import bind, lay_out

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Job:
    """One quantisation.

    works       by layer, the trunk's last
    procedure   what is done to weights
    rotation    of hidden states, or None
    sequences   token ids of calibration; none where inputs are not looked at
    section     `quantization_config` of the new config.json
    where       layers and methods are computed
    gpu         what the GPU that does is called; None: the CPU does
    """

    checkpoint: Checkpoint
    model: Model
    layouts: Layouts
    works: list[LayerWork]
    procedure: Procedure
    rotation: HiddenRotation | None
    sequences: list[list[int]]
    options: QuantizeOptions
    section: Mapping[str, Any]
    where: torch.device = _HOST
    gpu: str | None = None

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def config(self) -> dict[str, Any]:
        """What is otherwise in the new config.json: see `units.py`."""
        if self.rotation is None:
            return {}
        changed: dict[str, Any] = {"tie_word_embeddings": False}
        if "num_nextn_predict_layers" in self.checkpoint.config:
            changed["num_nextn_predict_layers"] = 0
        return changed

    def identity(self) -> dict[str, Any]:
        """What two runs must share for one to go on with what the other has written."""
        own = dict(self.options.identity())
        # What of memory counts is remembered: see `driver.py`.  Equal GPUs give equal numbers.
        del own["host_memory_bytes"], own["gpu_memory_bytes"]
        own["gpu"] = self.gpu
        return own | identity(self.checkpoint, self.sequences)


def prepare(
    path: Path, options: QuantizeOptions, where: torch.device = _HOST, gpu: str | None = None
) -> Job:
    """What quantising the checkpoint in folder `path` is.

    where   it is computed
    gpu     what the GPU that does is called; None: the CPU does
    Raises CheckpointError, ConfigError.
    """
    source = open_source(path)
    if source.pack is not None:
        raise CheckpointError(f"{path} is a pack: quantise the checkpoint that it was made of")
    checkpoint = source.checkpoint
    procedure = open_procedure(options.method)
    model = open_model(checkpoint.config, checkpoint.path, torch.float32)
    bound = bind(model.spec, checkpoint)
    layouts = lay_out(bound, target(Scheme()))
    architecture, rotation = model.spec.architecture, None
    if procedure.rotation is not None:
        if architecture not in checkpoint.config.get("architectures", ()):
            raise ConfigError(
                f"{path} is {architecture} within another model, such as one that sees "
                "images, whose features would have to be rotated, too: leave rotate out of --method"
            )
        rotation = hidden_rotation(model.spec, procedure.rotation)
    if procedure.scaling is not None and architecture not in FOLDABLE:
        raise ConfigError(
            f"which activations of {architecture} can be scaled is not known, only those of "
            f"{', '.join(sorted(FOLDABLE))}: leave awq and smoothquant out of --method"
        )
    works = plan_work(
        model.spec, checkpoint, bound, sensitive_of(checkpoint.path, model.spec), options, {},
        rotated=rotation is not None,
    )  # fmt: skip
    sequences: list[list[int]] = []
    reads_text = bool(procedure.needs) or options.measures
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
            sequences = own_sequences(path, count, length, options)
        else:
            sequences = calibration_sequences(
                options.calibration, source.tokenizer(), count, length
            )
    return Job(
        checkpoint, model, layouts, works, procedure, rotation, sequences, options,
        _section(works), where, gpu,
    )  # fmt: skip


def with_forms(job: Job, chosen: Mapping[str, Target | str]) -> Job:
    """The same with other forms of some modules, or reasons why they stay, once all is measured.

    Raises ConfigError where nothing would be quantised.
    """
    spec, checkpoint = job.model.spec, job.checkpoint
    works = plan_work(
        spec, checkpoint, bind(spec, checkpoint), sensitive_of(checkpoint.path, spec), job.options,
        chosen, rotated=job.rotation is not None,
    )  # fmt: skip
    sequences = job.sequences if job.procedure.needs else []
    return replace(job, works=works, sequences=sequences, section=_section(works))


def _section(works: list[LayerWork]) -> Mapping[str, Any]:
    modules = {unit.module: unit.target for work in works for unit in work.units}
    return quantization_config(modules, (name for work in works for name in work.ignored))
