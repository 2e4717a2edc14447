"""The command `soak`: a server under everything at once, for long."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hmt.base.errors import MachineError
from hmt.cli.console import notes
from hmt.cli.eval import held_out_text
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def soak(
    model: ModelArgument = None,
    seconds: Annotated[float, typer.Option(help="How long.")] = 1800.0,
    users: Annotated[int, typer.Option(help="At once.")] = 12,
    parts: Annotated[int, typer.Option(help="After each the server is looked at, at rest.")] = 12,
    questions: Annotated[int, typer.Option(help="Whose right answers are known.")] = 24,
    context: Annotated[int, typer.Option(help="Tokens, of the server.")] = 2048,
    host_memory: Annotated[
        str, typer.Option(help="Of the server; two models take turns in it.")
    ] = "96MiB",
    prefix_cache: Annotated[
        bool, typer.Option(help="Let prompts go on from what earlier ones left.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Answers, cancels, disconnects, bad requests, slow readers, models that come and go.

    Greedy answers are compared with the plain executor's.  The exit status is 1 where one was
    wrong, or the server grew, or did not end in order.
    """
    try:
        from hmt_bench.soak import Plan, run
    except ImportError as error:
        raise MachineError(
            f"soak needs {error.name}, which is not installed: pip install 'hmt[serve]'"
        ) from error
    from hmt.cli.formatting import write_json

    plan = Plan(
        seconds, users, parts, questions, context, host_memory, prefix_cache=prefix_cache, seed=seed
    )
    with notes().status("starting") as status:
        content = run(plan, choose_model(model), held_out_text(None), status.update)
    _print(content)
    write_json(content, json)
    if not content["verdict"]["passed"]:
        raise typer.Exit(1)


def _print(content: dict[str, Any]) -> None:
    console, rests = Console(highlight=False), content["rests"]
    console.print(
        f"{content['requests']} requests, {content['answers_compared']} answers compared; "
        f"{rests[0]['rss_bytes'] >> 20} MiB after the first part, "
        f"{rests[-1]['rss_bytes'] >> 20} MiB at the end; ended in "
        f"{content['shutdown']['seconds']} s"
    )
    for name, passed in content["verdict"].items():
        console.print(f"  {name.replace('_', ' ')}: {'yes' if passed else 'NO'}")
    for wrong in content["wrong"]:
        console.print(f"  {wrong}", markup=False)
