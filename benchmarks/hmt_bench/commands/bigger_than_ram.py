"""The command `larger-than-ram`: models larger than RAM, beside others that try."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate, parse_bytes
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write

if TYPE_CHECKING:
    from hmt.engine.experts.trace import Routed
    from hmt.profiling.random_model import Shape

_WIDTH = 120
_MADE_UP_STEPS = 1000


def larger_than_ram(
    shape: Annotated[
        str,
        typer.Option(
            help="Sizes of the random model: dense, moe or small; flash-next or glm-flash, which "
            "HMT alone runs."
        ),
    ] = "dense",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of flash-next or glm-flash; all without.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Bytes of the first GPU that HMT has; none without.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Hard limit of each process.")] = "2GiB",
    quant: Annotated[str, typer.Option(help="Encoding of HMT's pack.")] = "w4a8:32",
    only: Annotated[
        str | None, typer.Option(help="Contenders, by the beginnings of their names: hmt,llama.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = 16,
    runs: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 150,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Traces that route a mixture of experts; one that is made up without."),
    ] = None,
    folder: Annotated[
        Path | None,
        folder_to_write("Where the models are kept for the next time; deleted without."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Models larger than RAM: HMT beside memory maps and accelerate, under one hard limit."""
    from hmt.cli.formatting import write_json
    from hmt.hardware.machine import remembered
    from hmt.profiling.probe import measure
    from hmt_bench.bigger_than_ram import SHAPES, competitors, disk_rate_now, run
    from hmt_bench.larger_models import LARGE_MODELS

    if shape not in SHAPES and shape not in LARGE_MODELS:
        raise ConfigError(f"--shape {shape}: choose {' or '.join((*SHAPES, *LARGE_MODELS))}")
    if layers is not None and shape not in LARGE_MODELS:
        raise ConfigError(f"--layers {layers}: only {' and '.join(LARGE_MODELS)} have fewer")
    limit = parse_bytes(memory)
    gpu_bytes = None if gpu_memory is None else parse_bytes(gpu_memory)
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        models = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pack, gguf, given = _prepared(models, shape, layers, quant, trace or [], status.update)
        rivals = competitors(
            pack, limit, gguf=gguf, checkpoint=given, context=256, gpu_memory=gpu_bytes
        )
        if only is not None:
            wanted = tuple(only.split(","))
            rivals = [rival for rival in rivals if rival.name.startswith(wanted)]
        status.update("measuring the disk")
        machine = measure(pack, quick=False)
        best = remembered(pack).disk
        assert best is not None, "just measured"
        content = run(
            rivals,
            limit,
            machine,
            lambda: disk_rate_now(pack, best),
            tokens=tokens,
            runs=runs,
            timeout_s=timeout,
            progress=status.update,
        )
    _print(content)
    write_json({**content, "shape": shape, "layers": layers}, json)


def _prepared(
    models: Path,
    shape: str,
    layers: int | None,
    quant: str,
    traces: list[Path],
    progress: Callable[[str], None],
) -> tuple[Path, Path | None, Path | None]:
    """The pack of a shape, and its GGUF file and checkpoint where others run them."""
    from hmt_bench.bigger_than_ram import SHAPES, prepare
    from hmt_bench.larger_models import LARGE_MODELS, write_large_pack

    if shape in LARGE_MODELS:
        model = LARGE_MODELS[shape]
        model = replace(model, layers=layers or model.layers)
        folder = models / f"{shape}-{model.layers}"
        return write_large_pack(folder, model, quant, progress), None, None
    sizes = SHAPES[shape]
    routing = _routing(sizes, traces)
    checkpoint, pack, gguf = prepare(models / shape, sizes, quant, progress, routing)
    return pack, gguf, checkpoint if checkpoint.exists() else None


def _routing(shape: "Shape", traces: list[Path]) -> "list[Routed]":
    """How the experts of `shape` are chosen, step by step."""
    from hmt_bench.synthetic_trace import synthetic_trace
    from hmt_bench.widened_trace import widened_trace

    if traces or not shape.experts:
        return widened_trace(traces, shape) if shape.experts else []
    layers, experts, top_k = range(shape.layers), shape.experts, shape.experts_per_token
    return synthetic_trace(_MADE_UP_STEPS, layers=layers, experts=experts, top_k=top_k)[1]


def _print(content: dict[str, Any]) -> None:
    table = Table(
        title=f"{format_bytes(content['memory_limit_bytes'])} of memory, disk "
        f"{format_rate(median(content['drive_rates']))}",
        box=None,
    )
    shares = {
        "read_share": "of disk",
        "busy_share": "while busy",
        "useful_share": "useful",
        "waiting_share": "waiting",
        "overlap": "overlap",
        "hit_rate": "hits",
        "table_share": "tables",
    }
    for column in ("", "GiB", "tokens/s", "read", *shares.values(), "peak", "failed"):
        table.add_column(column, justify="right" if column else "left")
    for found in content["results"]:
        rate, most = found["tokens_per_s"], found["at_most_tokens_per_s"]
        table.add_row(
            found["name"],
            f"{content['sizes'][found['name']]:.1f}",
            f"< {most:.3f}" if rate is None else f"{rate:.3g}",
            "-" if found["disk_rate"] is None else format_rate(found["disk_rate"]),
            *("-" if found[name] is None else f"{found[name]:.0%}" for name in shares),
            format_bytes(found["rss_bytes"]),
            str(len(found["failures"]) or ""),
        )
    Console(width=_WIDTH).print(table)
