"""`hmt convert`: a pack made of a checkpoint, once, so that later runs only read."""

import time
from pathlib import Path
from typing import Annotated

import typer

from hmt.base.units import format_bytes, format_rate, format_seconds

_INTERRUPTED = 130  # as shells count: 128 + SIGINT


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; the pack.")],
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quant",
            "--quantization",
            help="How to store linear weights, as in `hmt run`; none when left out.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a pack in OUT, once the new one is complete.")
    ] = False,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Memory for blocks on their way; more than a few are never there."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Blocks to convert at a time; one per physical core when left out."),
    ] = None,
    disk_reader: Annotated[
        str | None, typer.Option(help="direct (past the page cache), or buffered.")
    ] = None,
) -> None:
    """Make a pack: weights converted and laid out for reading, with checksums.

    A conversion that was ended goes on when the same command is given again.
    """
    from rich.console import Console

    from hmt.cli.console import notes, working

    try:
        with working("opening") as report:
            from hmt.engine import EngineConfig
            from hmt.engine.loading.packs import convert

            begin = time.perf_counter()
            config = EngineConfig.resolve(
                quantization=quantization,
                host_memory=host_memory,
                threads=threads,
                disk_reader=disk_reader,
            )
            manifest = convert(
                checkpoint.expanduser(), out.expanduser(), config, force=force, progress=report
            )
    except KeyboardInterrupt:
        notes().print("stopped; the same command goes on from here")
        raise typer.Exit(_INTERRUPTED) from None
    seconds = time.perf_counter() - begin
    Console(highlight=False).print(
        f"[bold]{out}[/]: {format_bytes(manifest.data_bytes)} in {len(manifest.extents())} extents "
        f"({manifest.scheme}), from {format_bytes(manifest.published_bytes)} in "
        f"{format_seconds(seconds)} ({format_rate(manifest.published_bytes / seconds)})",
        soft_wrap=True,
    )
