"""The command `gpu`: models that fit on a GPU and models that do not, beside others."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate, parse_bytes
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write

_WIDTH = 120


def gpu(
    shape: Annotated[
        str, typer.Option(help="Sizes of the random model: 8b, 70b, 30b-moe or small.")
    ] = "8b",
    memory: Annotated[
        str, typer.Option(help="Memory of the GPU to use, one or several: 16GiB,4GiB.")
    ] = "16GiB",
    quant: Annotated[str, typer.Option(help="Encoding of the weights.")] = "w4a16:32",
    host_memory: Annotated[str, typer.Option(help="Host memory to use.")] = "100GiB",
    batches: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,32",
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of each sequence.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of a prompt; 0: none.")] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    peers: Annotated[
        bool,
        typer.Option(
            help="Also time torch, compiled (models that fit), or transformers with accelerate."
        ),
    ] = True,
    llama_bench: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's program of this name: compare with it instead."),
    ] = None,
    gpu_id: Annotated[str, typer.Option(help="Which GPU, by number, or several: 0,1.")] = "0",
    tp: Annotated[
        int, typer.Option(min=1, help="Processes, each on one of --gpu-id's, that compute layers.")
    ] = 1,
    folder: Annotated[
        Path | None,
        folder_to_write("Where the model is kept for the next time; deleted without."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option(help="Only make the model in --folder, for another time.")
    ] = False,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """A model with a GPU: speeds, and their shares of what GPU, link and CPU allow."""
    from hmt.cli.formatting import write_json
    from hmt_bench.gpu import SHAPES, Task, llama_cpp, open_peer, pack_of, run

    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: choose {' or '.join(SHAPES)}")
    budgets = memory.split(",")
    for budget in budgets:
        parse_bytes(budget)
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        models = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if prepare:
            pack_of(models, shape, quant, status.update)
            return
        peer = open_peer if llama_bench is None else llama_cpp(llama_bench, models)
        content = run(
            models,
            shape,
            budgets,
            Task(numbers("--batches", batches), tokens, prompt, runs),
            quantization=quant,
            host_memory=host_memory,
            gpu=gpu_id,
            tp=tp,
            peer=peer if peers else None,
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """A list of positive numbers.  Raises ConfigError for another text."""
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise ConfigError(f"{option} {text}: give a list such as 1,32")
    return found


def _print(content: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rates = {name: rate for name, rate in content["rates"].items() if name != "encoding"}
    console.print(f"{content['shape']['name']} in {content['quantization']} on {content['gpu']}")
    console.print(", ".join(f"{name} {format_rate(rate)}" for name, rate in rates.items()))
    for result in content["results"]:
        read = ", ".join(f"{format_bytes(n)} {where}" for where, n in result["read_bytes"].items())
        console.print(f"{result['gpu_memory']}: a token reads {read}")
        if peer := result.get("peer"):
            console.print("peer " + (peer.get("failure") or f"{peer['name']}: {peer['note']}"))
        _show(result["cases"])


def _show(cases: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    columns = ("", "tokens/s", "share", "of host's", "link busy", "of link", "CPU busy")
    for column in (*columns, "peer", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for case in cases:
        table.add_row(
            case["name"],
            f"{case['tokens_per_s']:.1f}",
            *(_percent(case[name]) for name in ("share", "away_share")),
            *(_percent(case[name]) for name in ("link_busy", "link_share", "cpu_busy")),
            _number(case["peer_tokens_per_s"], 2),
            _number(case["ratio"], 2),
        )
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
