"""The command `peer`: HMT beside llama.cpp, with all weights in memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_rate
from hmt.cli.bench import result_table, show_table
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write, write_json


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
    from hmt_bench.four_bits import SHAPES

    for option, given, known in (("--peer", peer, ["llama.cpp"]), ("--shape", shape, [*SHAPES])):
        if given not in known:
            raise ConfigError(f"{option} {given}: choose {' or '.join(known)}")
    with notes().status("starting") as status, _scratch(folder) as models:
        from hmt_bench.peer import run

        content = run(
            models / shape,
            SHAPES[shape],
            threads=threads,
            runs=runs,
            progress=status.update,
        )
    _print(content)
    write_json(content, json)


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """The given folder, or one that is deleted afterwards."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="hmt-bench-") as name:
        yield Path(name)


def _print(content: dict[str, Any]) -> None:
    machine, model, agreement = content["machine"], content["model"], content["agreement"]
    table = result_table(
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
    show_table(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else format_rate(rate)
