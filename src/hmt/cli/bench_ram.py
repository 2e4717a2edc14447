"""`hmt bench bigger-than-ram`: models larger than RAM, beside others that try."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate, parse_bytes
from hmt.cli.console import notes

_WIDTH = 110


def bigger_than_ram(
    shape: Annotated[
        str, typer.Option(help="Sizes of the random model: dense, moe or small.")
    ] = "dense",
    memory: Annotated[str, typer.Option(help="Hard limit of each process.")] = "2GiB",
    quant: Annotated[str, typer.Option(help="Encoding of HMT's pack.")] = "w4a8:32",
    only: Annotated[
        str | None, typer.Option(help="Contenders, by the beginnings of their names: hmt,llama.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = 16,
    runs: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 150,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the models are kept for the next time; deleted without."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File to write the results to.")] = None,
) -> None:
    """Models larger than RAM: HMT beside memory maps and accelerate, under one hard limit."""
    from hmt.bench.bigger_than_ram import SHAPES, contenders, prepare, run
    from hmt.cli.bench import write_json
    from hmt.engine.machine import measure

    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: choose {' or '.join(SHAPES)}")
    limit = parse_bytes(memory)
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        models = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, pack, gguf = prepare(models / shape, SHAPES[shape], quant, status.update)
        rivals = contenders(pack, limit, gguf=gguf, checkpoint=checkpoint, context=256)
        if only is not None:
            wanted = tuple(only.split(","))
            rivals = [rival for rival in rivals if rival.name.startswith(wanted)]
        status.update("measuring the drive")
        machine = measure(pack, quick=False)
        content = run(
            rivals,
            limit,
            machine,
            tokens=tokens,
            runs=runs,
            timeout_s=timeout,
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


def _print(content: dict[str, Any]) -> None:
    machine = content["machine"]
    table = Table(
        title=f"{format_bytes(content['memory_limit_bytes'])} of memory, drive "
        f"{format_rate(machine['disk_read_rate'])}",
        box=None,
    )
    for column in ("", "GiB", "tokens/s", "read", "of drive", "waiting", "hits", "peak", "failed"):
        table.add_column(column, justify="right" if column else "left")
    for found in content["results"]:
        rate, most = found["tokens_per_s"], found["at_most_tokens_per_s"]
        table.add_row(
            found["name"],
            f"{content['sizes'][found['name']]:.1f}",
            f"< {most:.3f}" if rate is None else f"{rate:.3g}",
            "-" if found["disk_rate"] is None else format_rate(found["disk_rate"]),
            *(
                "-" if found[name] is None else f"{found[name]:.0%}"
                for name in ("read_share", "waiting_share", "hit_rate")
            ),
            format_bytes(found["rss_bytes"]),
            str(len(found["failures"]) or ""),
        )
    Console(width=_WIDTH).print(table)
