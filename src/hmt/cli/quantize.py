"""`hmt quantize`: fewer bits for a model's weights, with calibration, whatever the memory."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_seconds, parse_bytes
from hmt.cli import finetune
from hmt.cli import quantize_options as options
from hmt.cli.chosen_bits import chosen_lines

if TYPE_CHECKING:
    from hmt.quantizing import Quantized

_INTERRUPTED = 130  # as shells count: 128 + SIGINT
_NAMED = 5  # weights that are named, of those with a note


def add_commands(app: typer.Typer) -> None:
    """Add what makes weights: `quantize`, and `finetune`."""
    app.command("quantize")(quantize)
    app.command("finetune")(finetune.finetune)


def quantize(
    model: options.Model,
    out: options.Out,
    method: options.Method = "rtn",
    form: options.Format = "int",
    bits: options.Bits = None,
    group_size: options.GroupSize = None,
    asymmetric: options.Asymmetric = False,
    recipe: options.Recipe = "uniform",
    bits_of: options.BitsOf = None,
    keep: options.Keep = None,
    target_size: options.TargetSize = None,
    widths: options.Widths = None,
    sensitivity: options.Sensitivity = False,
    calibration: options.Calibration = "builtin",
    sequences: options.Sequences = 128,
    length: options.Length = 512,
    host_memory: options.HostMemory = None,
    gpu_memory: options.GpuMemory = None,
    gpus: options.Gpus = None,
    force: options.Force = False,
) -> None:
    """Quantise a model block by block, as a folder that transformers, vLLM and HMT load.

    A run that was ended goes on when the same command is given again.
    """
    from hmt.cli.console import notes, working

    try:
        with working("opening") as report:
            from hmt.engine import EngineConfig
            from hmt.quantizing import WIDTHS, QuantizeOptions, bits_by_recipe, target_named
            from hmt.quantizing import quantize as run

            begin = time.perf_counter()
            memory = EngineConfig.resolve(
                host_memory=host_memory, gpu_memory=gpu_memory, gpus=_usual_gpu(gpus, gpu_memory)
            )
            if len(memory.gpus or ()) > 1:
                raise ConfigError(f"--gpus {gpus}: one GPU quantises; name one")
            wanted = QuantizeOptions(
                method=method,
                target=target_named(form, bits, group_size, not asymmetric),
                bits_of=bits_by_recipe(recipe) + tuple(map(_bits_of, bits_of or ())),
                keep=tuple(keep or ()),
                calibration=calibration,
                sequences=sequences,
                length=length,
                sensitivity=sensitivity,
                target_bytes=None if target_size is None else parse_bytes(target_size),
                widths=WIDTHS if widths is None else _widths(widths),
                host_memory_bytes=memory.host_memory_bytes,
                gpu=(memory.gpus or ("0",))[0] if memory.on_gpu else None,
                gpu_memory_bytes=(memory.gpu_memory_bytes or (None,))[0],
            )
            done = run(model.expanduser(), out.expanduser(), wanted, force=force, progress=report)
    except KeyboardInterrupt:
        notes().print("stopped; the same command goes on from here")
        raise typer.Exit(_INTERRUPTED) from None
    _print(done, out, time.perf_counter() - begin)


def _usual_gpu(given: str | None, memory: str | None) -> str | None:
    """The GPU to compute on: the first, where there is one and nothing else is said."""
    from hmt.memory.device import gpu_is_usable

    if given is None and memory is None and gpu_is_usable():
        return "0"
    return given


def _bits_of(given: str) -> tuple[str, int]:
    pattern, _, bits = given.rpartition("=")
    if not pattern or not bits.isdecimal():
        raise ConfigError(f"--bits-of {given} is not PATTERN=BITS, such as down_proj=8")
    return pattern, int(bits)


def _widths(given: str) -> tuple[int, ...]:
    parts = given.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--widths {given} is no list of bits, such as 3,4,8")
    return tuple(sorted({int(part) for part in parts}))


def _print(done: "Quantized", out: Path, seconds: float) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    weights = done.report["weights"]
    console.print(
        f"[bold]{out}[/]: {format_bytes(done.written_bytes)}, from "
        f"{format_bytes(done.read_bytes)}, in {format_seconds(seconds)}; {len(weights)} weights"
        + (f", {done.tokens} tokens of calibration" if done.tokens else ""),
        soft_wrap=True,
    )
    error = sum(line["error"] for line in weights) / len(weights)
    nearest = sum(line["nearest"] for line in weights) / len(weights)
    console.print(f"mean relative squared error {error:.2e}; rounded to nearest {nearest:.2e}")
    for line in chosen_lines(done.report.get("groups", [])):
        console.print(line, soft_wrap=True, markup=False)
    sensitive = done.report.get("sensitive", [])
    if sensitive:
        console.print(f"{len(sensitive)} weights stay in 16 bits (sensitive_layers.json):")
        for entry in sensitive[:_NAMED]:
            console.print(
                f"  {entry['op']} of layer {entry['layer']}: KL {entry.get('kl')}, "
                f"R {entry.get('R')}, energy {entry.get('energy')}",
                soft_wrap=True,
            )
    noted = [line for line in weights if line["note"]]
    if noted:
        console.print(
            f"{len(noted)} weights were treated otherwise (all: quantization_report.json):"
        )
        for line in noted[:_NAMED]:
            console.print(f"  {line['module']}: {line['note']}", soft_wrap=True)
