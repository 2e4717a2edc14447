"""The command `images`: first tokens behind an image, beside transformers."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, write_json


def images(
    shape: Annotated[
        str, typer.Option(help="qwen2.5-vl-7b, qwen3-vl-8b, or -small in place of -7b and -8b.")
    ] = "qwen2.5-vl-7b",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    memory: Annotated[
        str,
        typer.Option(
            help="HOST, or GPU:HOST with --device cuda; several after commas, each is a run."
        ),
    ] = "20GiB",
    layers: Annotated[
        int, typer.Option(min=0, help="Layers of the language model; 0: all that it has.")
    ] = 0,
    encoder_layers: Annotated[
        int, typer.Option(min=0, help="Layers of the encoder; 0: all that it has.")
    ] = 0,
    side: Annotated[int, typer.Option(min=32, help="Pixels of an image in each direction.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 33,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    peer: Annotated[bool, typer.Option(help="Measure transformers, too.")] = True,
    models: Annotated[Path, typer.Option(help="Where checkpoints are kept.")] = Path(
        "build/models"
    ),
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """First token behind an image, and its encoder alone, of a model with random weights."""
    from hmt_bench.images import Task, run
    from hmt_bench.random_vision import SHAPES

    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape}: give one of {', '.join(SHAPES)}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: give cpu or cuda")
    runs = tuple(_memory(one, device) for one in memory.split(","))
    task = Task(shape, device, runs, layers, side, tokens, rounds, peer, encoder_layers)
    with notes().status("starting") as status:
        content = run(models, task, status.update)
    Console(highlight=False).print(_table(content))
    write_json(content, json)


def _memory(text: str, device: str) -> tuple[str, str]:
    gpu, _, host = text.rpartition(":")
    if bool(gpu) != (device == "cuda"):
        raise ConfigError(
            f"--memory {text}: give GPU:HOST with --device cuda, and HOST with --device cpu"
        )
    return gpu, host


def _table(content: dict[str, Any]) -> Table:
    task = content["task"]
    table = Table(title=f"{task['shape']}, {task['side']} x {task['side']}", box=None)
    columns = "", "processor", "encoder", "first token", "tokens/s", "text", "first image"
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for one in content["results"]:
        name = f"{one['gpu_memory']} {one['host_memory']}".strip()
        first = one["first_image"]
        told = f"{_ms(first['encoded_s'])}, {_ms(first['first_token_s'])}"
        table.add_row(name, *_row(one), f"{one['text_tokens_per_s'] or 0:.1f}", told)
    if peer := content.get("transformers"):
        table.add_row(f"transformers {peer['version']}", *_row(peer), "", "")
    return table


def _row(one: dict[str, Any]) -> list[str]:
    times = [_ms(one[name]) for name in ("prepared_s", "encoded_s", "first_token_s")]
    return [*times, f"{one['tokens_per_s'] or 0:.1f}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
