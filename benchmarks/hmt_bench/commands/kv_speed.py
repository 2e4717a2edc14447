"""The command `kv-speed`: decoding after long contexts, with the KV cache at several levels."""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate, parse_bytes
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write
from hmt_bench.commands.gpu import numbers

_WIDTH = 130


def kv_speed(
    shape: Annotated[
        str, typer.Option(help="Sizes of the random model: 8b, small, or v3.2, some layers.")
    ] = "8b",
    contexts: Annotated[
        str, typer.Option(help="Positions before the tokens that are decoded.")
    ] = "32768,131072",
    near: Annotated[str, typer.Option(help="--kv-gpu-memory of what is tiered.")] = "2GiB",
    host: Annotated[
        str, typer.Option(help="How the others are kept in host memory: exact,int8,int4.")
    ] = "exact,int8",
    all_near: Annotated[
        bool, typer.Option(help="Also decode with all keys and values where layers compute.")
    ] = True,
    steps: Annotated[int, typer.Option(min=1, help="Tokens of each case; medians count.")] = 24,
    quant: Annotated[str, typer.Option(help="Encoding of the weights.")] = "w4a16:32",
    memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU to use; 90% of what is free without.")
    ] = None,
    host_memory: Annotated[str, typer.Option(help="Host memory to use.")] = "64GiB",
    gpu_id: Annotated[
        str, typer.Option(help="Which GPU, by number; none: on the CPU alone.")
    ] = "0",
    peers: Annotated[
        bool, typer.Option(help="Also time transformers' caches: near, offloaded, quantized.")
    ] = True,
    folder: Annotated[
        Path | None,
        folder_to_write("Where the model is kept for the next time; deleted without."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Decoding after long contexts: time by device and CPU, attention beside the rate of RAM."""
    from hmt.cli.formatting import write_json
    from hmt_bench.gpu import SHAPES
    from hmt_bench.kv_peers import open_peers
    from hmt_bench.kv_speed import Task, Way, run
    from hmt_bench.larger_models import LAYER_SETS

    if shape not in LAYER_SETS and (shape not in SHAPES or SHAPES[shape].experts):
        raise ConfigError(f"--shape {shape}: choose 8b, small or {' or '.join(LAYER_SETS)}")
    if peers and shape in LAYER_SETS:
        raise ConfigError(f"--shape {shape} has no peers: say --no-peers")
    parse_bytes(near)
    gpu = None if gpu_id == "none" else gpu_id
    ways = [Way(near, name) for name in host.split(",") if name]
    if all_near:
        ways.insert(0, Way())
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        models = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        content = run(
            models,
            shape,
            ways,
            Task(numbers("--contexts", contexts), steps),
            quantization=quant,
            gpu=gpu,
            gpu_memory=memory,
            host_memory=host_memory,
            peers=partial(open_peers, where="cpu" if gpu is None else "cuda") if peers else None,
            progress=status.update,
            save=lambda content: write_json(content, json),
        )
    _print(content)
    write_json(content, json)


def _print(content: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    where = content["gpu"] or "the CPU"
    console.print(
        f"{content['shape']['name']} in {content['quantization']} on {where}, host memory "
        f"{format_rate(content['ram_rate'])}"
    )
    table = Table(box=None)
    columns = ("", "context", "tokens/s", "step", "CPU attends", "waits", "rest", "short step")
    for column in (*columns, "CPU reads", "rate", "link", "of RAM"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for result in content["results"] + content["peers"]:
        name = result.get("name", "a peer")
        for case in result.get("cases") or [result]:
            where = f"{name}, {case['context']:,}" if "context" in case else name
            if failure := case.get("failure"):
                console.print(f"{where}: {failure}")
            elif "step_s" in case:
                table.add_row(name, f"{case['context']:,}", *_row(case))
    console.print(table)


def _row(case: dict[str, Any]) -> list[str]:
    row = [f"{case['tokens_per_s']:.1f}", _ms(case["step_s"])]
    if "attended_s" not in case:
        return row
    row += [_ms(case[name]) for name in ("attended_s", "waited_s", "rest_s", "short_step_s")]
    row.append(format_bytes(case["host_bytes"]))
    if case["attended_rate"]:
        row += [format_rate(case["attended_rate"]), format_rate(case["link_rate"])]
        row.append(f"{case['read_share']:.0%}")
    return row


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
