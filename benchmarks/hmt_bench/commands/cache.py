"""The commands `cache` and `traces`: which experts stay, and how often that helps."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError, os_reason
from hmt.base.units import format_bytes
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, taking_files, write_json, write_text
from hmt.cli.options import EngineOptions, expand

_TABLE_WIDTH = 96


def cache(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces of --expert-trace; a synthetic one when left out."),
    ] = None,
    svg: Annotated[Path | None, file_to_write("File for the curves as a picture.")] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Replay traces of experts through every cache policy, and the best choices there are."""
    with notes().status("starting") as status:
        from hmt.bench.environment import describe
        from hmt.hardware.machine import machine_for
        from hmt_bench.cache import load_traces, run

        content = run(load_traces(files or []), progress=status.update)
        content["machine"] = describe(machine_for(Path.cwd()))
    for result in content["results"]:
        _print(result, content)
    _print_dense(content)
    write_json(content, json)
    if svg is not None:
        from hmt_bench.cache import hit_curves_svg

        write_text(svg, hit_curves_svg(content))


@expand
def traces(
    engine: EngineOptions,
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint with experts.")],
    folder: Annotated[Path, typer.Argument(help="Where the traces go.", callback=taking_files)],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each kind of text.")] = 1000,
    text: Annotated[
        Path | None, typer.Option(help="Prose; when left out, that in HMT's repository.")
    ] = None,
) -> None:
    """Record traces of experts on prose, code, tables and chat, one token at a time."""
    file = text or Path(__file__).parents[3] / "assets" / "text" / "valid.txt"
    try:
        prose = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = os_reason(error) if isinstance(error, OSError) else error
        raise ConfigError(
            f"the prose {file} cannot be read ({why}): give a text with --text"
        ) from error
    with notes().status("starting") as status:
        from hmt_bench.trace_texts import record

        options = engine.arguments()
        written = record(
            model, folder, prose, tokens=tokens, options=options, progress=status.update
        )
    for path in written:
        print(f"{path}  {format_bytes(path.stat().st_size)}")


def _print(result: dict[str, Any], content: dict[str, Any]) -> None:
    title = (
        f"{result['model']}, {result['trace']}: experts of {format_bytes(result['experts_bytes'])}"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("served from memory, at", no_wrap=True)
    for residency in content["residencies"]:
        table.add_column(f"{residency:.4g}".removeprefix("0"), justify="right", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    for curve in result["curves"]:
        cost = content["eviction_us"].get(curve["policy"])
        table.add_row(
            curve["policy"],
            *(f"{rate:.1%}" for rate in curve["rates"]),
            "" if cost is None else f"{cost:.1f}",
        )
        if "guesses" in curve["policy"]:
            table.add_row("  bytes read for it", *(f"{read:.1%}" for read in curve["reads"]), "")
    _show(table)


def _print_dense(content: dict[str, Any]) -> None:
    table = Table(
        title="dense blocks, all through the cache: read per token, at",
        title_justify="left",
        box=None,
        padding=(0, 1),
    )
    table.add_column("", no_wrap=True)
    for residency in content["dense_residencies"]:
        table.add_column(f"{residency:.0%}", justify="right", no_wrap=True)
    for name, shares in content["dense"].items():
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    _show(table)


def _show(table: Table) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)
