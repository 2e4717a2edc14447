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
        bool, typer.Option("--quick", help="Two ways of reading instead of sixty.")
    ] = False,
    toml: Annotated[
        Path | None,
        typer.Option(help="File to write this machine to, for `hmt plan --machine` elsewhere."),
    ] = None,
) -> None:
    """Measure memory, products and disk rates, and save them for `plan` and `run`."""
    from rich.console import Console

    from hmt.cli.console import notes
    from hmt.engine.machine import cache_file, measure, remembered
    from hmt.memory import best_of
    from hmt.planner.machine_file import machine_toml

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
        best = remembered(path).disk or best_of(results)
        console.print(
            f"drive of {path}:  [bold]{format_rate(best.rate)}[/] with {best.reader}, "
            f"{best.depth} reads of {format_bytes(best.block_bytes)} at a time"
        )
        if not quick:
            for reader in dict.fromkeys(result.reader for result in results):
                console.print(_table([r for r in results if r.reader == reader], best))
    for kernel, read in machine.cpu_rates.items():
        operations = machine.cpu_ops[kernel] / 1e9
        console.print(
            f"products with {kernel}: [bold]{format_rate(read)}[/] for one token, "
            f"{operations:.0f} G operations/s for many"
        )
    if toml is not None:
        toml.write_text(machine_toml(machine))
        console.print(f"[dim]written to {toml}[/]")
    console.print(f"[dim]saved in {cache_file()}[/]")


def _table(results: "list[DiskRate]", best: "DiskRate") -> "Table":
    """Rates of one reader; what was measured twice shows the second one."""
    from rich.table import Table

    rates = {(result.block_bytes, result.depth): result.rate for result in results}
    chosen = (best.block_bytes, best.depth) if best.reader == results[0].reader else None
    title = f"{results[0].reader}: size of one read, by reads at a time"
    table = Table(title=title, title_justify="left")
    depths = sorted({depth for _, depth in rates})
    table.add_column("", justify="right")
    for depth in depths:
        table.add_column(str(depth), justify="right")
    for block_bytes in sorted({block for block, _ in rates}):
        cells = []
        for depth in depths:
            rate = rates.get((block_bytes, depth))
            text = "" if rate is None else format_rate(rate)
            cells.append(f"[bold green]{text}[/]" if (block_bytes, depth) == chosen else text)
        table.add_row(format_bytes(block_bytes), *cells)
    return table
