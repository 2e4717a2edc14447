"""`hmt verify`: whether a pack still is what was written."""

import time
from pathlib import Path
from typing import Annotated

import typer

from hmt.base.units import format_bytes, format_rate


def verify(
    pack: Annotated[Path, typer.Argument(help="Folder of a pack.")],
    host_memory: Annotated[str | None, typer.Option(help="Memory to read into.")] = None,
    disk_reader: Annotated[
        str | None, typer.Option(help="direct (past the page cache), or buffered.")
    ] = None,
) -> None:
    """Read all of a pack, compare every checksum, and say what is damaged.  Exit code 1 then."""
    from rich.console import Console

    from hmt.cli.console import working

    with working("verifying") as report:
        from hmt.engine import EngineConfig
        from hmt.engine.loading.packs import verify

        config = EngineConfig.resolve(host_memory=host_memory, disk_reader=disk_reader)
        begin = time.perf_counter()
        found = verify(
            pack.expanduser(), config, lambda done, total: report("verifying", done, total)
        )
        seconds = time.perf_counter() - begin
    console, manifest = Console(highlight=False), found.manifest
    for damage in found.damages:
        console.print(
            f"[bold red]damaged[/] {damage.file}: {damage.what}, {damage.nbytes} bytes at offset "
            f"{damage.offset}: {damage.problem}",
            soft_wrap=True,
        )
    read = f"{format_bytes(manifest.data_bytes)} read at "
    read += format_rate(manifest.data_bytes / seconds)
    everything = len(manifest.extents()) + len(manifest.copies)
    if found.damages:
        console.print(f"{len(found.damages)} of {everything} extents and files damaged; {read}")
        raise typer.Exit(1)
    console.print(f"{everything} extents and files are what was written; {read}")
