"""The command `pages`: what pages of the KV cache waste, by their size."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.units import format_seconds
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, write_text


def pages(
    mean: Annotated[float, typer.Option(min=1, help="Tokens of a text, on average.")] = 200,
    deviation: Annotated[float, typer.Option(min=0, help="Standard deviation of that.")] = 120,
    longest: Annotated[int, typer.Option(min=1, help="No text is longer.")] = 4096,
    texts: Annotated[int, typer.Option(min=1, help="Texts that come and go.")] = 100_000,
    svg: Annotated[Path | None, file_to_write("File for the curve as a picture.")] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Let texts of random lengths come and go: what pages of each size waste and cost."""
    from hmt.bench.environment import describe
    from hmt.cli.formatting import write_json
    from hmt.hardware.machine import machine_for
    from hmt_bench.pages import Lengths, run, waste_svg

    with notes().status("starting") as status:
        content = run(Lengths(mean, deviation, longest), texts=texts, progress=status.update)
        content["machine"] = describe(machine_for(Path.cwd()))
    table = Table(box=None)
    for column in ("tokens", "wasted", "growing", "unusable", "pieces", "table", "time"):
        table.add_column(column, justify="right")
    for result in content["results"]:
        table.add_row(
            str(result["tokens"]),
            *(f"{result[name]:.1%}" for name in ("wasted", "wasted_growing", "unusable")),
            f"{result['runs']:.1f}",
            f"{result['table_bytes']:.0f} B",
            format_seconds(result["taken_s"]),
        )
    Console().print(table)
    write_json(content, json)
    if svg is not None:
        write_text(svg, waste_svg(content))
