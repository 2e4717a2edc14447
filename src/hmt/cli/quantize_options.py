"""Arguments and flags of `hmt quantize`."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = (
    "How weights are rounded: rtn, to the nearest; gptq, which lets inputs make up for what others "
    "lost by rounding; or signround, which learns the direction of each. Before that, with commas "
    "between: rotate[=SEED], which spreads large numbers; smoothquant[=SHARE] or awq, which move "
    "what is hard to round from activations into weights, or the other way round."
)

Model = Annotated[Path, typer.Argument(help="Folder of a checkpoint in 16 bits, or in FP8.")]
Out = Annotated[Path, typer.Argument(help="Folder to make; of compressed-tensors.")]
Method = Annotated[str, typer.Option(help=METHODS)]
Format = Annotated[str, typer.Option("--format", help="int, nvfp4 or mxfp4.")]
Bits = Annotated[int | None, typer.Option(help="Of an integer, 2 to 8; 4 when left out.")]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Inputs that share a scale: 32 when left out; 0: one for each row."),
]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="Integers with zero points.")]
Recipe = Annotated[
    str,
    typer.Option(
        help="uniform: the same bits everywhere; or mixed: values, outputs of attention and "
        "shared experts in 8."
    ),
]
BitsOf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=BITS",
        help="Other bits for modules in whose name a regular expression is found, such as "
        "down_proj=8; may be repeated, and the last that is found counts.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Modules to leave as they are, likewise; may be repeated."
    ),
]
TargetSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of all tensors' files, such as 20GiB: bits of integers are chosen for each layer "
        "by the error that they cause in its output, most for a byte first.",
    ),
]
Widths = Annotated[
    str | None,
    typer.Option(
        metavar="BITS,...",
        help="Bits that --target-size chooses from; 2,3,4,5,6,8 when left out.",
    ),
]
Sensitivity = Annotated[
    bool,
    typer.Option(
        "--sensitivity",
        help="Measure each weight at the bits asked for, leave those in 16 bits whose outputs "
        "suffer most, and name them in OUT's sensitive_layers.json.",
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        help="Text that inputs of layers are measured with: builtin; own, chats that the model "
        "writes before; or a file. A .jsonl file has an object a line: "
        '{"text": ...}, or {"messages": [...]}.'
    ),
]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of it to read.")]
Length = Annotated[int, typer.Option(min=32, help="Tokens of each.")]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for weights, statistics and activations; 80% of what is available when "
        "left out."
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the GPU to use, such as 16GiB; 90% of what is free when left out; 0: the "
        "CPU computes alone."
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(help="Which GPU computes, by number; the first, where there is one."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a quantised model in OUT, once the new is complete."),
]
