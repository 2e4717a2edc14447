"""The command `speculation-check`: whether draft tokens change any token of an answer."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def speculation_check(
    model: ModelArgument = None,
    ways: Annotated[str, typer.Option(help="Values of --speculate.")] = "auto",
    host_memory: Annotated[str, typer.Option(help="Budgets, the largest first.")] = "2GiB",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,5",
    tokens: Annotated[int, typer.Option(min=5, help="In each case.")] = 5000,
    every: Annotated[
        bool, typer.Option("--every", help="Verify all draft tokens, whatever they cost.")
    ] = False,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Greedy tokens with and without speculation, which must be equal."""
    from hmt.cli.formatting import write_json
    from hmt_bench.speculation_check import check

    sizes = [int(size) for size in batches.split(",")]
    with notes().status("starting") as status:
        content = check(
            choose_model(model), ways.split(","), host_memory.split(","), sizes, tokens=tokens,
            every=every, progress=status.update,
        )  # fmt: skip
    table = Table(title=content["model"], title_justify="left", box=None)
    for number, name in enumerate(("", "", "batch", "equal tokens", "steps", "accepted")):
        table.add_column(name, justify="right" if number > 1 else "left")
    for one in content["results"]:
        table.add_row(
            one["way"], one["host_memory"], str(one["batch"]), str(one["equal_tokens"]),
            str(one["steps"]), f"{one['accepted']} of {one['proposed']}",
        )  # fmt: skip
    Console(highlight=False).print(table)
    write_json(content, json)
