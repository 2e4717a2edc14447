"""The command `speculation`: decoding with and without draft tokens."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def speculation(
    model: ModelArgument = None,
    ways: Annotated[
        str,
        typer.Option(
            help="Values of --speculate, and llama.cpp=N: its lookup of N tokens, 0 for none.  The "
            "first of an engine is what others are compared with."
        ),
    ] = "off,auto",
    host_memory: Annotated[str, typer.Option(help="Of each of them.")] = "2GiB",
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5,
    context: Annotated[int, typer.Option(min=64, help="Positions.")] = 1024,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine; default: one per core.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: on a GPU.")] = "cpu",
    gpu_memory: Annotated[str, typer.Option(help="With --device cuda.")] = "4GiB",
    shape: Annotated[
        str, typer.Option(help="With --device cuda: one of `gpu`, random, instead of a model.")
    ] = "",
    quant: Annotated[str, typer.Option(help="With --shape: encoding of the weights.")] = "none",
    accepted: Annotated[
        float,
        typer.Option(
            help="With --shape: share of draft tokens that are right, at the price of a "
            "prediction layer; 0: the engine's own proposer."
        ),
    ] = 0.0,
    models: Annotated[Path, typer.Option(help="With --shape: where packs are kept.")] = Path(
        "build/models"
    ),
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Decoding with and without speculation, interleaved, on prompts of several kinds."""
    from hmt.cli.formatting import write_json
    from hmt_bench.speculation import run

    if shape:
        task = (shape, quant, gpu_memory, host_memory, accepted, tokens, rounds)
        write_json(_of_shape(models, task), json)
        return
    options: dict[str, Any] = {"host_memory": host_memory, "context": context, "threads": threads}
    if device == "cuda":
        options |= {"gpu_memory": gpu_memory, "gpus": "0"}
    with notes().status("starting") as status:
        content = run(
            choose_model(model), ways.split(","), options, tokens=tokens, rounds=rounds,
            progress=status.update,
        )  # fmt: skip
    table = Table(title=f"{content['model']}, {host_memory}", title_justify="left", box=None)
    for number, name in enumerate(("", "", "tokens/s", "ratio", "tokens/step", "accepted")):
        table.add_column(name, justify="right" if number > 1 else "left")
    for one in content["results"]:
        table.add_row(
            one["prompt"], one["way"], f"{one['tokens_per_s']:.1f}", f"{one['ratio']:.2f}",
            f"{one['tokens_per_step'] or 0:.2f}", f"{one['accepted']} of {one['proposed']}",
        )  # fmt: skip
    Console(highlight=False).print(table)
    write_json(content, json)


def _of_shape(models: Path, task: tuple[Any, ...]) -> dict[str, Any]:
    from hmt_bench.speculation_gpu import Task, run

    with notes().status("starting") as status:
        content = run(models, Task(*task), status.update)
    table = Table(title=f"{task[0]} in {task[1]}", title_justify="left", box=None)
    for name in ("", "off", "auto", "ratio", "tokens/step", "accepted", "same"):
        table.add_column(name, justify="right" if name else "left")
    for one in content["results"]:
        table.add_row(
            one["text"], f"{one['off']:.1f}", f"{one['auto']:.1f}", f"{one['ratio']:.2f}",
            f"{one['tokens_per_step']:.2f}", f"{one['accepted']} of {one['proposed']}",
            str(one["same_answers"]),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for note in content["notes"]:
        console.print(note, markup=False)
    return content
