"""`hmt bench prefix`: a long prompt that comes again after a restart."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.units import format_seconds
from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write, folder_to_write
from hmt.cli.options import ModelArgument, choose_model


def prefix(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 30_000,
    runs: Annotated[int, typer.Option(min=1, help="Runs; medians count.")] = 3,
    folder: Annotated[
        Path | None,
        folder_to_write("Folder on the disk to measure; a temporary one when left out."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="The prompt; when left out, HMT's held-out text.")
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """The first token of a prompt that an earlier process computed, beside computing it again."""
    from hmt.bench.prefix import run
    from hmt.cli.formatting import write_json

    prompt = held_out_text(text)
    with (
        notes().status("starting") as status,
        tempfile.TemporaryDirectory(prefix="hmt-prefix-", dir=folder) as made,
    ):
        content = run(
            choose_model(model), prompt, Path(made), tokens=tokens, runs=runs,
            progress=status.update,
        )  # fmt: skip
    table = Table(title=f"{content['model']}, {tokens} tokens", title_justify="left", box=None)
    for number, name in enumerate(("", "first token", "computed", "pages read", "closing")):
        table.add_column(name, justify="right" if number else "left")
    for result in content["results"]:
        table.add_row(
            result["case"],
            format_seconds(result["first_token_s"]),
            str(result["computed_tokens"]),
            str(result["pages_read"]),
            format_seconds(result["closing_s"]),
        )
    Console(highlight=False).print(table)
    write_json(content, json)
