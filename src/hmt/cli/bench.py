"""`hmt bench`: measurements that later work is held to."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate
from hmt.cli import bench_cache
from hmt.cli.bench_gpu import gpu
from hmt.cli.bench_hybrid import hybrid
from hmt.cli.bench_kv import kv
from hmt.cli.bench_kv_speed import kv_speed
from hmt.cli.bench_pages import pages
from hmt.cli.bench_plans import plans
from hmt.cli.bench_predictions import predictions
from hmt.cli.bench_prefix import prefix
from hmt.cli.bench_ram import bigger_than_ram
from hmt.cli.bench_serve import serve
from hmt.cli.bench_soak import soak
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write, write_json
from hmt.cli.options import EngineOptions, expand

_TABLE_WIDTH = 96

app = typer.Typer(help="Measure what HMT makes of this machine.", no_args_is_help=True)
app.command("cache")(bench_cache.cache)
app.command("traces")(bench_cache.traces)
app.command("bigger-than-ram")(bigger_than_ram)
app.command("gpu")(gpu)
app.command("hybrid")(hybrid)
app.command("kv")(kv)
app.command("kv-speed")(kv_speed)
app.command("pages")(pages)
app.command("plans")(plans)
app.command("predictions")(predictions)
app.command("prefix")(prefix)
app.command("serve")(serve)
app.command("soak")(soak)


@app.command("decode")
@expand
def decode(
    engine: EngineOptions,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint; random weights of 1.2 GB when left out."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per run.")] = 16,
    runs: Annotated[int, typer.Option(min=3, help="Runs per case; medians count.")] = 3,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Decode with all weights in memory and with a quarter of it; rates against the machine's.

    --host-memory and --executor are set by the benchmark.
    """
    with notes().status("starting") as status, _checkpoint(model) as folder:
        from hmt.bench.decode import run
        from hmt.profiling.probe import measure

        status.update("measuring memory and disk")
        machine = measure(folder, quick=False)
        content = run(
            folder,
            tokens=tokens,
            runs=runs,
            options=engine.arguments(),
            machine=machine,
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


@app.command("peer")
def peer(
    peer: Annotated[str, typer.Option(help="The engine beside HMT: llama.cpp.")] = "llama.cpp",
    shape: Annotated[
        str, typer.Option(help="Sizes of the random model: llama-1b or qwen3-moe.")
    ] = "llama-1b",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of both; torch's choice when left out.")
    ] = None,
    runs: Annotated[int, typer.Option(min=3, help="Runs per case; medians count.")] = 3,
    folder: Annotated[
        Path | None,
        folder_to_write("Where the two models are kept for the next time; deleted without."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """HMT beside another engine: the same weights, threads and tokens, turn by turn."""
    from hmt.bench.random_model import SHAPES

    for option, given, known in (("--peer", peer, ["llama.cpp"]), ("--shape", shape, [*SHAPES])):
        if given not in known:
            raise ConfigError(f"{option} {given}: choose {' or '.join(known)}")
    with notes().status("starting") as status, _scratch(folder) as models:
        from hmt.bench.peer import run

        content = run(
            models / shape,
            SHAPES[shape],
            threads=threads,
            runs=runs,
            progress=status.update,
        )
    _print_peer(content)
    write_json(content, json)


@app.command("kernels")
def kernels(
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; torch's choice when left out.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Rows and columns of the weights, as in 4096x4096,14336x4096."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Per product, as in 1,256: 1 measures memory, many arithmetic."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Sequences and positions of attention, as in 16x1024; none when empty."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Names as in the table, such as w4a8:32,bf16.")
    ] = None,
    runs: Annotated[int, typer.Option(min=3, help="Rounds; medians count.")] = 5,
    gpu: Annotated[
        str | None, typer.Option(help="Number of a GPU, to measure its kernels.")
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Each kernel's share of the machine's memory and arithmetic, beside torch's."""
    wanted: dict[str, Any] = {
        name: read(f"--{option}", given)
        for name, option, given, read in (
            ("shapes", "sizes", sizes, _pairs),
            ("contexts", "contexts", contexts, _pairs),
            ("tokens", "tokens", tokens, _counts),
        )
        if given is not None
    }
    wanted |= {"names": None if only is None else set(only.split(",")), "runs": runs}
    with notes().status("starting") as status:
        if gpu is None:
            from hmt.bench.kernels import run

            content = run(threads=threads, progress=status.update, **wanted)
        else:
            from hmt.bench.gpu_kernels import run as run_on_gpu

            content = run_on_gpu(gpu, progress=status.update, **wanted)
    _print_kernels(content)
    write_json(content, json)


def _pairs(option: str, text: str) -> list[tuple[int, int]]:
    return [(a, b) for a, b in _numbers(option, text, 2)]


def _counts(option: str, text: str) -> list[int]:
    return [n for (n,) in _numbers(option, text, 1)]


def _numbers(option: str, text: str, count: int) -> list[tuple[int, ...]]:
    """So many numbers joined by x, in each part of a list.  Raises ConfigError."""
    try:
        found = [tuple(map(int, part.split("x"))) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [()]
    if any(len(numbers) != count or min(numbers) < 1 for numbers in found):
        example = "x".join(["4096"] * count)
        raise ConfigError(f"{option} {text}: give a list such as {example},{example}")
    return found


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """The given folder, or one that is deleted afterwards."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="hmt-bench-") as name:
        yield Path(name)


@contextmanager
def _checkpoint(model: Path | None) -> Iterator[Path]:
    """The given checkpoint, or random weights that are deleted afterwards."""
    if model is not None:
        yield model
        return
    from hmt.bench.random_model import write_random_llama

    with _scratch(None) as folder:
        write_random_llama(folder)
        yield folder


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _show(table: Table) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)  # a pipe has no width of its own
    console.print(table)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else format_rate(rate)


def _print(content: dict[str, Any]) -> None:
    machine, model = content["machine"], content["model"]
    title = (
        f"{format_bytes(model['published_bytes'])} of weights on {machine['name']}, "
        f"{machine['threads']} threads, {machine['instructions'] or machine['kernels']} "
        f"kernels; memory "
        f"{format_rate(machine['cpu']['read_rate'])}, disk "
        f"{format_rate(machine['disk_read_rate'])}"
    )
    table = _table(title, "case", "tokens/s", "from RAM", "from disk", "waiting", "rate", "share")
    for result in content["results"]:
        table.add_row(
            result["case"],
            f"{result['tokens_per_s']:.2f}",
            format_bytes(result["host_bytes_per_token"]),
            format_bytes(result["disk_bytes_per_token"]),
            f"{result['waiting_share']:.0%}",
            format_rate(result["rate"]),
            "-" if result["share"] is None else f"{result['share']:.0%} of {result['link']}",
        )
    _show(table)


def _print_peer(content: dict[str, Any]) -> None:
    machine, model, agreement = content["machine"], content["model"], content["agreement"]
    table = _table(
        f"{machine['name']}, {machine['threads']} threads; memory "
        f"{format_rate(content['read_rate'])}\n"
        f"a token reads {format_bytes(model['hmt_token_bytes'])} (HMT, "
        f"{content['hmt']['quantization']}) and {format_bytes(model['peer_token_bytes'])} "
        f"({content['peer']['name']}, Q4_0)\n"
        f"logits agree to a cosine of {agreement['logits_cosine']:.4f}; the likeliest token is "
        f"{'the same' if agreement['same_argmax'] else 'another'}",
        *("tokens/s", "HMT", content["peer"]["name"], "ratio"),
        *("HMT reads", "share", f"{content['peer']['name']} reads", "share"),
    )
    for result in content["results"]:
        table.add_row(
            result["case"],
            f"{result['hmt_tokens_per_s']:.1f}",
            f"{result['peer_tokens_per_s']:.1f}",
            f"{result['ratio']:.2f}",
            *(_rate(result["hmt_rate"]), _percent(result["hmt_share"])),
            *(_rate(result["peer_rate"]), _percent(result["peer_share"])),
        )
    _show(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _print_kernels(content: dict[str, Any]) -> None:
    machine, peaks = content["machine"], content["peaks"]
    reached = ", ".join(f"{kind} {ops / 1e9:.0f}" for kind, ops in peaks.items())
    if "gpu" in content:
        where, how = content["gpu"], "in torch's products"
    else:
        where = f"{machine['name']}, {machine['threads']} threads, {content['isa']}"
        how = "on registers"
    table = _table(
        f"{where}; memory {format_rate(content['read_rate'])}; billions of operations {how}: "
        f"{reached}",
        *("case", "tokens", "weights", "engine", "time", "reads", "of memory", "Gop/s", "of peak"),
    )
    before = None
    for result in content["results"]:
        case = (result["case"], result["tokens"])
        if before not in (None, case):
            table.add_section()
        share = result["peak_share"]
        table.add_row(
            *("", "") if case == before else (case[0], str(case[1])),
            result["name"],
            result["engine"],
            f"{result['seconds'] * 1e3:.3f} ms",
            format_rate(result["rate"]),
            f"{result['read_share']:.0%}",
            f"{result['operations_per_s'] / 1e9:.0f}",
            "-" if share is None else f"{share:.0%} of {result['peak']}",
        )
        before = case
    _show(table)
    if content.get("not_captured"):
        typer.echo(f"Not captured, so with the host's time: {'; '.join(content['not_captured'])}")
