"""The command `drift`: what watching requests costs, and what it finds."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write
from hmt.cli.options import EngineOptions, ModelArgument, choose_model, expand


@expand
def drift(
    engine: EngineOptions,
    model: ModelArgument = None,
    pieces: Annotated[int, typer.Option(min=1, help="Of held-out text, how many.")] = 110,
    sequences: Annotated[int, typer.Option(min=4, help="Pieces that calibrate.")] = 128,
    runs: Annotated[
        int, typer.Option(min=1, help="Pairs of runs, watched and not; medians count.")
    ] = 25,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Requests whose activations are watched: the cost in steps, false alarms, drift caught."""
    from hmt.cli.formatting import write_json
    from hmt_bench.drift import run

    with notes().status("starting") as status:
        content = run(
            choose_model(model), held_out_text(None), engine.arguments(),
            sequences=sequences, pieces=pieces, runs=runs, progress=status.update,
        )  # fmt: skip
    console = Console(highlight=False)
    table = Table(title=content["model"], title_justify="left", box=None)
    for name in ("", "more time", "quartiles", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for cost in content["costs"]:
        quartiles = " to ".join(f"{share:.2%}" for share in cost["quartiles"])
        rate = f"{cost['tokens_per_s']:.0f}"
        table.add_row(cost["case"], f"{cost['share']:.2%}", quartiles, rate)
    console.print(table)
    for kind, (alarms, of) in content["alarms"].items():
        console.print(f"{kind}: {alarms} of {of} drift")
    write_json(content, json)
