"""The command `kv`: what a model still knows with its KV cache offloaded and in fewer bits."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hmt.base.errors import ConfigError
from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def kv(
    model: ModelArgument = None,
    settings: Annotated[
        str | None,
        typer.Option(
            help="full, warm:NAME, cold:NAME or warm:NAME,cold:NAME, with spaces between; all that "
            "are published when left out."
        ),
    ] = None,
    retrieval: Annotated[
        str, typer.Option(help="Lengths of retrieval sequences, and how many: 2048x8,8192x4.")
    ] = "2048x8",
    tasks: Annotated[int, typer.Option(min=0, help="Short tasks; 0 leaves them out.")] = 200,
    windows: Annotated[
        int, typer.Option(min=0, help="Windows of 2048 tokens for the perplexity.")
    ] = 8,
    near: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of a context that stays near.")
    ] = 0.12,
    text: Annotated[
        Path | None,
        typer.Option(help="Held-out text; when left out, the one in HMT's repository."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Compute on a GPU, with so much of its memory.")
    ] = None,
    gpu_id: Annotated[str, typer.Option(help="Which one.")] = "0",
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Scores of a model whose keys and values are kept at several levels, in several encodings."""
    from hmt.cli.formatting import write_json

    lengths = _lengths(retrieval)
    options = {} if gpu_memory is None else {"gpu_memory": gpu_memory, "gpus": gpu_id}
    with notes().status("starting") as status:
        from hmt_bench.kv_quality import SETTINGS, Sizes, run

        content = run(
            choose_model(model),
            held_out_text(text),
            settings.split() if settings is not None else SETTINGS,
            Sizes(lengths, tasks, windows, near),
            options,
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


def _lengths(text: str) -> dict[int, int]:
    """Sequences by length.  Raises ConfigError."""
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        found = {length: count for length, count in pairs}
    except ValueError:
        found = {}
    if not found or min(found) < 1 or min(found.values()) < 0:
        raise ConfigError(f"--retrieval {text}: give lengths and numbers, such as 2048x8,8192x4")
    return found


def _print(content: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=content["model"], title_justify="left", box=None, padding=(0, 1))
    for number, name in enumerate(
        ("setting", "context", "near", "bytes/token", "tasks", "retrieval", "perplexity")
    ):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for result in content["results"]:
        scores = [result.get("tasks"), result["retrieval"].get(str(result["length"]))]
        table.add_row(
            result["setting"],
            str(result["length"]),
            f"{result['near_share']:.0%}",
            f"{result['mean_bytes_per_token']:.0f}",
            *("-" if score is None else f"{score[0]} of {score[1]}" for score in scores),
            f"{result['heldout_ppl']:.2f}" if "heldout_ppl" in result else "-",
        )
    console = Console(highlight=False)
    console.width = max(console.width, 96)
    console.print(table)
