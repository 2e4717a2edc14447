"""The command `encoders`: encoders of images on the CPU, beside transformers' own in turns."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, write_json

_DTYPES = ("bfloat16", "float32")


def encoders(
    shapes: Annotated[
        str, typer.Option(help="qwen2.5-vl-7b, qwen3-vl-8b, siglip-so400m, or -small of the first.")
    ] = "qwen2.5-vl-7b,qwen3-vl-8b,siglip-so400m",
    dtypes: Annotated[str, typer.Option(help="bfloat16, float32, or both.")] = ",".join(_DTYPES),
    layers: Annotated[int, typer.Option(min=1, help="Of the encoder.")] = 4,
    side: Annotated[int, typer.Option(min=32, help="Pixels of an image in each direction.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    models: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = Path(
        "build/models"
    ),
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Encoders of published widths and random weights, HMT's and transformers' in turns."""
    from hmt_bench.encoders import Task, run
    from hmt_bench.random_vision import SHAPES

    task = Task(tuple(shapes.split(",")), tuple(dtypes.split(",")), layers, side, rounds)
    for what, given, known in (
        ("shape", task.shapes, tuple(SHAPES)),
        ("dtype", task.dtypes, _DTYPES),
    ):
        if other := [name for name in given if name not in known]:
            raise ConfigError(f"there is no {what} {other[0]}: give of {', '.join(known)}")
    with notes().status("starting") as status:
        content = run(models, task, status.update)
    Console(highlight=False).print(_table(content))
    write_json(content, json)


def _table(content: dict[str, Any]) -> Table:
    task = content["task"]
    side = task["side"]
    table = Table(title=f"{task['layers']} layers, {side} x {side} pixels", box=None)
    for name in ("", "dtype", "patches", "HMT", "transformers", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for one in content["results"]:
        times = [f"{one[name]:.2f} s" for name in ("encoded_s", "transformers_s")]
        table.add_row(
            one["shape"], one["dtype"], str(one["patches"]), *times, f"{one['ratio']:.2f}"
        )
    return table
