"""`hmt-inference`: the same path as `hmt run`, with flags that name hardware."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hmt.cli import run
from hmt.cli.main import guard
from hmt.cli.options import EngineOptions, SamplingOptions

app = typer.Typer(name="hmt-inference", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inference(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; a chat when left out.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint; the embedded model when left out."),
    ] = None,
    numa_node: Annotated[str | None, typer.Option(help="NUMA node to bind to, or auto.")] = None,
    gpu_id: Annotated[
        str, typer.Option(help="GPU to compute on, by number; none for the CPU alone.")
    ] = "none",
    ssd_path: Annotated[
        Path | None,
        typer.Option(help="Folder on a fast disk for quantised weights that do not fit."),
    ] = None,
    max_context: Annotated[int | None, typer.Option(help="Positions of KV cache to keep.")] = None,
) -> None:
    """Answer a prompt, or chat."""
    engine = EngineOptions(
        gpus=None if gpu_id in ("none", "-1") else gpu_id,
        context=max_context,
        spill_dir=ssd_path,
        numa=numa_node,
    )
    path, prompt = run.choose(None if model is None else str(model), prompt)
    run.answer_or_chat(run.Job(path, prompt, engine, SamplingOptions()))


def main() -> NoReturn:
    """Run the command line."""
    guard(app)
