"""The command `adapters`: decoding with low-rank adapters beside decoding without."""

from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write
from hmt.cli.options import ModelArgument, choose_model


def adapters(
    model: ModelArgument = None,
    count: Annotated[int, typer.Option(min=1, help="Requests at once, and adapters.")] = 16,
    rank: Annotated[int, typer.Option(min=1, max=256, help="Of each adapter.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each way is measured.")] = 5,
    quant: Annotated[str | None, typer.Option(help="As for hmt run.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="As for hmt run.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="As for hmt run.")] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Decode without adapters, with one, and with another for each request, interleaved."""
    from hmt.bench.environment import describe
    from hmt.cli.formatting import write_json
    from hmt.hardware.machine import machine_for
    from hmt_bench.adapters import run

    given = {"quantization": quant, "host_memory": host_memory, "gpu_memory": gpu_memory}
    options = {name: value for name, value in given.items() if value is not None}
    path = choose_model(model)
    with notes().status("starting") as status:
        content = run(
            path, adapters=count, rank=rank, tokens=tokens, rounds=rounds,
            progress=status.update, **options,
        )  # fmt: skip
        content["machine"] = describe(machine_for(path))
    table = Table(box=None)
    for column in ("adapters", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for name, ratio in content["ratios"].items():
        table.add_row(name, f"{median(content['tokens_per_s'][name]):.1f}", f"{ratio:.2f}")
    Console().print(table)
    write_json(content, json)
