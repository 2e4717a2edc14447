"""`hmt probe`: how fast this machine's memory and drive are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import MissingFileError
from hmt.base.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.table import Table

    from hmt.memory import DiskRate


def probe(
    path: Annotated[
        Path, typer.Argument(help="A folder or file on the drive to measure; best, a checkpoint.")
    ] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="One way of reading instead of thirty.")
    ] = False,
) -> None:
    """Measure memory and disk rates, and save them for `plan` and `run`."""
    from rich.console import Console

    from hmt.cli.console import notes
    from hmt.engine.machine import cache_file, measure

    if not path.exists():
        raise MissingFileError(f"{path} does not exist; give a folder on the drive to measure")
    results: list[DiskRate] = []
    with notes().status("measuring memory") as status:

        def show(result: "DiskRate") -> None:
            results.append(result)
            status.update(f"measuring the drive: {format_rate(result.rate)}")

        machine = measure(path, quick=quick, progress=show)
    console = Console(highlight=False)
    console.print(
        f"{machine.name}, {machine.cores} cores, {format_bytes(machine.ram_bytes)} of RAM"
    )
    rate = format_rate(machine.ram_read_rate) if machine.ram_read_rate else "not measured"
    console.print(f"memory, all cores reading:  [bold]{rate}[/]")
    if not results:
        console.print(
            f"drive of {path}: [yellow]not measured[/]; it needs a file of 64 MiB or more there, "
            "or the right to write one"
        )
    else:
        best = max(results, key=lambda result: result.rate)
        console.print(
            f"drive of {path}, O_DIRECT:  [bold]{format_rate(best.rate)}[/] "
            f"with {best.threads} reads of {format_bytes(best.block_bytes)} at a time"
        )
        if not quick:
            console.print(_table(results, best))
    console.print(f"[dim]saved in {cache_file()}[/]")


def _table(results: "list[DiskRate]", best: "DiskRate") -> "Table":
    from rich.table import Table

    table = Table(title="drive: size of one read, by reads at a time", title_justify="left")
    threads = sorted({result.threads for result in results})
    table.add_column("", justify="right")
    for count in threads:
        table.add_column(str(count), justify="right")
    for block_bytes in sorted({result.block_bytes for result in results}):
        row = [result for result in results if result.block_bytes == block_bytes]
        cells = [
            f"[bold green]{format_rate(r.rate)}[/]" if r is best else format_rate(r.rate)
            for r in sorted(row, key=lambda result: result.threads)
        ]
        table.add_row(format_bytes(block_bytes), *cells)
    return table
