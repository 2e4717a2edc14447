"""`hmt bench`: measurements that later work is held to."""

import json as json_format
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hmt.base.units import format_bytes, format_rate
from hmt.cli.console import notes
from hmt.cli.options import EngineOptions, expand

_TABLE_WIDTH = 96

app = typer.Typer(help="Measure what HMT makes of this machine.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Keeps `decode` a command of its own while it is the only one."""


@app.command("decode")
@expand
def decode(
    engine: EngineOptions,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint; random weights of 1.2 GB when left out."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per run.")] = 16,
    runs: Annotated[int, typer.Option(min=3, help="Runs per case; medians count.")] = 3,
    json: Annotated[Path | None, typer.Option(help="File to write the results to.")] = None,
) -> None:
    """Decode with all weights in memory and with a quarter of it; rates against the machine's.

    --host-memory and --executor are set by the benchmark.
    """
    with notes().status("starting") as status, _checkpoint(model) as folder:
        from hmt.bench.decode import run
        from hmt.engine.machine import measure

        status.update("measuring memory and drive")
        machine = measure(folder, quick=False)
        content = run(
            folder,
            tokens=tokens,
            runs=runs,
            options=engine.arguments(),
            machine=machine,
            progress=status.update,
        )
    _print(content)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(json_format.dumps(content, indent=1) + "\n")


@contextmanager
def _checkpoint(model: Path | None) -> Iterator[Path]:
    """The given checkpoint, or random weights that are deleted afterwards."""
    if model is not None:
        yield model
        return
    from hmt.bench.random_model import write_random_llama

    with tempfile.TemporaryDirectory(prefix="hmt-bench-") as name:
        write_random_llama(Path(name))
        yield Path(name)


def _print(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine, model = content["machine"], content["model"]
    title = (
        f"{format_bytes(model['published_bytes'])} of weights on {machine['name']}, "
        f"{machine['threads']} threads, {machine['instructions'] or machine['kernels']} "
        f"kernels; memory "
        f"{format_rate(machine['ram_read_rate'])}, drive {format_rate(machine['disk_read_rate'])}"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in ("case", "tokens/s", "from RAM", "from disk", "waiting", "rate", "share"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for result in content["results"]:
        share = result["share"]
        table.add_row(
            result["case"],
            f"{result['tokens_per_s']:.2f}",
            format_bytes(result["host_bytes_per_token"]),
            format_bytes(result["disk_bytes_per_token"]),
            f"{result['waiting_share']:.0%}",
            format_rate(result["rate"]),
            "-" if share is None else f"{share:.0%} of {result['link']}",
        )
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)  # a pipe has no width of its own
    console.print(table)
