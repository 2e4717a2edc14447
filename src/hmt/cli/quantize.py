"""`hmt quantize`: fewer bits for a model's weights, with calibration, whatever the memory."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_seconds, parse_bytes
from hmt.cli.chosen_bits import chosen_lines

if TYPE_CHECKING:
    from hmt.quantizing import Quantized

_INTERRUPTED = 130  # as shells count: 128 + SIGINT
_METHODS = (
    "How weights are rounded: rtn, to the nearest; or gptq, which lets inputs make up for what "
    "others lost by rounding."
)
_NAMED = 5  # weights that are named, of those with a note

_TargetSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of all tensors' files, such as 20GiB: bits of integers are chosen for each layer "
        "by the error that they cause in its output, most for a byte first.",
    ),
]
_Widths = Annotated[
    str | None,
    typer.Option(
        metavar="BITS,...",
        help="Bits that --target-size chooses from; 2,3,4,5,6,8 when left out.",
    ),
]
_Sensitivity = Annotated[
    bool,
    typer.Option(
        "--sensitivity",
        help="Measure each weight at the bits asked for, leave those in 16 bits whose outputs "
        "suffer most, and name them in OUT's sensitive_layers.json.",
    ),
]
_Calibration = Annotated[
    str,
    typer.Option(
        help="Text that inputs of layers are measured with: builtin, or a file. A .jsonl file "
        'has an object a line: {"text": ...}, or {"messages": [...]}.'
    ),
]
_BitsOf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=BITS",
        help="Other bits for modules in whose name a regular expression is found, such as "
        "down_proj=8; may be repeated, and the last that is found counts.",
    ),
]


def quantize(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint in 16 bits, or in FP8.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; of compressed-tensors.")],
    method: Annotated[str, typer.Option(help=_METHODS)] = "rtn",
    form: Annotated[str, typer.Option("--format", help="int, nvfp4 or mxfp4.")] = "int",
    bits: Annotated[
        int | None, typer.Option(help="Of an integer, 2 to 8; 4 when left out.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale: 32 when left out; 0: one for each row."),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Integers with zero points.")
    ] = False,
    bits_of: _BitsOf = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Modules to leave as they are, likewise; may be repeated."
        ),
    ] = None,
    target_size: _TargetSize = None,
    widths: _Widths = None,
    sensitivity: _Sensitivity = False,
    calibration: _Calibration = "builtin",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of it to read.")] = 128,
    length: Annotated[int, typer.Option(min=32, help="Tokens of each.")] = 512,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights, statistics and activations; 80% of what is available when "
            "left out."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a quantised model in OUT, once the new is complete."),
    ] = False,
) -> None:
    """Quantise a model block by block, as a folder that transformers, vLLM and HMT load.

    A run that was ended goes on when the same command is given again.
    """
    from hmt.cli.console import notes, working

    try:
        with working("opening") as report:
            from hmt.engine import EngineConfig
            from hmt.quantizing import WIDTHS, QuantizeOptions, target_named
            from hmt.quantizing import quantize as run

            begin = time.perf_counter()
            options = QuantizeOptions(
                method=method,
                target=target_named(form, bits, group_size, not asymmetric),
                bits_of=tuple(map(_bits_of, bits_of or ())),
                keep=tuple(keep or ()),
                calibration=calibration,
                sequences=sequences,
                length=length,
                sensitivity=sensitivity,
                target_bytes=None if target_size is None else parse_bytes(target_size),
                widths=WIDTHS if widths is None else _widths(widths),
                host_memory_bytes=EngineConfig.resolve(host_memory=host_memory).host_memory_bytes,
            )
            done = run(model.expanduser(), out.expanduser(), options, force=force, progress=report)
    except KeyboardInterrupt:
        notes().print("stopped; the same command goes on from here")
        raise typer.Exit(_INTERRUPTED) from None
    _print(done, out, time.perf_counter() - begin)


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
