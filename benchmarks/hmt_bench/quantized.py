"""What a model still knows after each method of `hmt quantize`, in several forms.

Each is written as a folder, loaded again and asked by the protocol of `hmt.bench.quality`, with
activations in int8 as HMT computes by default ("a8") and in floats ("a16").
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes
from hmt.bench.environment import describe
from hmt.bench.quality import WINDOW, Extent, evaluate
from hmt.engine import Engine
from hmt.formats import open_checkpoint
from hmt.quantizing import QuantizeOptions, bits_by_recipe, quantize, target_named
from hmt.quantizing.methods import open_procedure

# METHOD:FORM[:RECIPE], where a form is int and its bits, nvfp4 or mxfp4; methods may be several.
# A size, such as 5.7MB, in the place of a recipe is `--target-size`.  A GGUF file of the same model
# is a row as well, to compare with.
ROWS = (
    *("rtn:int8", "gptq:int8", "smoothquant:int8"),
    *("rtn:int4", "signround:int4", "gptq:int4", "gptq:int4:mixed"),
    *("awq:int4", "smoothquant:int4", "rotate:int4", "rotate,gptq:int4"),
    *("rtn:int3", "signround:int3", "gptq:int3", "gptq:int3:mixed"),
    *("awq:int3", "rotate:int3", "rotate,gptq:int3"),
    *("rtn:nvfp4", "gptq:nvfp4", "rotate,gptq:nvfp4"),
    *("rtn:mxfp4", "gptq:mxfp4", "rotate,gptq:mxfp4"),
)
_MEMORY = "1GiB"
_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """How much is measured, and what calibration reads."""

    extent: Extent
    calibration: str
    text: str


def run(
    model: Path, rows: Sequence[str], asked: Asked, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Scores of `model` as it is and of each row: JSON.  Raises ConfigError for rows of no form."""
    options = [(row, _options(row, asked.calibration)) for row in rows]
    reference: torch.Tensor | None = None
    found: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for activations in ("a16", "a8"):
        progress(f"{model.name} {activations}")
        scores, logits = _measured(model, activations, asked, machine)
        reference = logits if reference is None else reference
        found.append({"row": "published", "activations": activations} | scores)
    for row, chosen in options:
        with tempfile.TemporaryDirectory(prefix="hmt-quantized-") as folder:
            if chosen is None:
                made, name = Path(row), Path(row).name
                nbytes = sum(record.nbytes for record in open_checkpoint(made).records.values())
            else:
                progress(f"{row}: quantising")
                made, name = Path(folder) / "out", row
                nbytes = quantize(model, made, chosen).written_bytes
            for activations in ("a16", "a8"):
                progress(f"{row} {activations}")
                scores, logits = _measured(made, activations, asked, machine)
                kl = None if reference is None or logits is None else _kl(reference, logits)
                entry = {"row": name, "activations": activations, "bytes": nbytes}
                found.append(entry | scores | {"kl": kl})
    return {
        "model": model.name,
        "calibration": asked.calibration,
        "rows": found,
        "measured_on": machine,
    }


def _options(row: str, calibration: str) -> QuantizeOptions | None:
    """None: it is a file."""
    if row.endswith(".gguf"):
        return None
    method, _, rest = row.partition(":")
    form, _, recipe = rest.partition(":")
    bits = form.removeprefix("int")
    if form not in ("nvfp4", "mxfp4") and not (form.startswith("int") and bits.isdecimal()):
        raise ConfigError(f"{row} is not METHOD:FORM, such as gptq:int4, rtn:nvfp4")
    target = target_named("int", int(bits), None, True) if bits.isdecimal() else None
    sized = recipe[:1].isdecimal()
    return QuantizeOptions(
        method=method,
        target=target or target_named(form, None, None, True),
        bits_of=() if sized else bits_by_recipe(recipe or "uniform"),
        target_bytes=parse_bytes(recipe) if sized else None,
        calibration=calibration if open_procedure(method).needs or sized else "builtin",
        host_memory_bytes=_BYTES,
    )


def _measured(
    folder: Path, activations: str, asked: Asked, machine: dict[str, Any]
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Scores, and log-probabilities over the first window of the text; `machine` is filled in."""
    context = max([WINDOW, *asked.extent.retrieval])
    kind = "exact" if activations == "a16" else "auto"
    with Engine(host_memory=_MEMORY, context=context, activations=kind) as engine:
        model = engine.load_model(folder)
        machine.update(describe(model.prepared.machine))
        scores = evaluate(model, model.tokenizer.encode, asked.text, asked.extent)
        logits = None
        if asked.extent.windows != 0:
            ids = model.tokenizer.encode(asked.text)[:WINDOW]
            logits = model.logits(ids, range(len(ids))).float().log_softmax(-1)
    return scores.as_json(), logits


def _kl(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of next tokens, from the model as published."""
    return float((reference.exp() * (reference - logits)).sum(-1).mean())
