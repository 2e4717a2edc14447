"""The command `quantized`: what a model still knows after each method of `hmt quantize`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def quantized(
    model: ModelArgument = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="METHOD:FORM or METHOD:FORM:RECIPE, with spaces between, such as "
            "'gptq:int4 rtn:nvfp4 gptq:int3:mixed', or a size in the recipe's place, such as "
            "'gptq:int4:5.7MB'; all when left out."
        ),
    ] = None,
    calibration: Annotated[str, typer.Option(help="As of `hmt quantize`.")] = "own",
    tasks: Annotated[int, typer.Option(min=0, help="Short tasks; 0 leaves them out.")] = 200,
    retrieval: Annotated[
        int, typer.Option(min=0, help="Retrieval sequences of 2048 tokens; 0 leaves them out.")
    ] = 8,
    windows: Annotated[
        int, typer.Option(min=0, help="Windows of 2048 tokens for the perplexity.")
    ] = 8,
    text: Annotated[
        Path | None,
        typer.Option(help="Held-out text; when left out, the one in HMT's repository."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Scores of a model by method and form, with activations in int8 and in floats."""
    from hmt.cli.formatting import write_json

    with notes().status("starting") as status:
        from hmt.bench.quality import Extent
        from hmt_bench.quantized import ROWS, Asked, run

        extent = Extent(tasks, {2048: retrieval} if retrieval else {}, windows)
        content = run(
            choose_model(model),
            ROWS if rows is None else rows.split(),
            Asked(extent, calibration, held_out_text(text)),
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


def _print(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=content["model"], title_justify="left", box=None, padding=(0, 1))
    for column in ("", "activations", "tasks", "retrieval", "perplexity", "KL", "bytes"):
        table.add_column(column, justify="right" if column else "left")
    for row in content["rows"]:
        right = {n: f"{score[0]} of {score[1]}" for n, score in row["retrieval"].items()}
        tasks = row.get("tasks")
        kl = row.get("kl")
        table.add_row(
            row["row"],
            row["activations"],
            f"{tasks[0]} of {tasks[1]}" if tasks else "-",
            right.get("2048", "-"),
            str(row.get("heldout_ppl", "-")),
            f"{kl:.4f}" if kl is not None else "-",
            str(row.get("bytes", "-")),
        )
    Console(highlight=False).print(table)
