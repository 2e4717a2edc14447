"""The command `quantize-large`: a model is quantised under a limit that it is larger than."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hmt.base.units import format_bytes, format_seconds, parse_bytes
from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write


def quantize_large(
    size: Annotated[str, typer.Option(help="Of the random checkpoint, in BF16.")] = "12GB",
    hidden: Annotated[int, typer.Option(min=64, help="Its width.")] = 2048,
    inner: Annotated[int, typer.Option(min=64, help="Width of its FFN.")] = 6144,
    memory: Annotated[str, typer.Option(help="Hard limit of the process.")] = "3GB",
    host_memory: Annotated[str, typer.Option(help="--host-memory of hmt quantize.")] = "2400MB",
    method: Annotated[str, typer.Option(help="--method of hmt quantize.")] = "gptq",
    sequences: Annotated[int, typer.Option(min=1, help="Of calibration.")] = 8,
    length: Annotated[int, typer.Option(min=32, help="Tokens of each.")] = 256,
    kills: Annotated[
        int, typer.Option(min=0, help="Times that a second run is killed; 0: there is none.")
    ] = 10,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of the first run.")] = 36000,
    folder: Annotated[
        Path | None,
        folder_to_write("Where all is kept, to go on after --timeout; deleted without."),
    ] = None,
    json: Annotated[Path | None, file_to_write("File to write the results to.")] = None,
) -> None:
    """Quantise a random dense model larger than the limit; then again, killed and resumed."""
    from hmt.cli.formatting import write_json
    from hmt_bench.quantize_large import Case, measure

    options = {
        "method": method,
        "sequences": sequences,
        "length": length,
        "host_memory_bytes": parse_bytes(host_memory),
    }
    case = Case(parse_bytes(size), hidden, inner, parse_bytes(memory), options)
    with ExitStack() as stack:
        status = stack.enter_context(notes().status("starting"))
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        content = measure(case, place, kills, timeout, status.update)
    console = Console(highlight=False)
    if "seconds" in content:
        console.print(
            f"{format_bytes(content['model_bytes'])} under {format_bytes(case.limit_bytes)}: "
            + ("complete" if content["complete"] else "not complete")
            + f" after {format_seconds(content['seconds'])}; the group's peak is "
            f"{format_bytes(content['group_peak_bytes'])}, the process's "
            f"{format_bytes(content['resident_peak_bytes'])}"
        )
    if "plan" in content:
        console.print(
            f"planned: {format_bytes(content['plan']['total'])}, and "
            f"{format_bytes(content['process_bytes'])} of the process before it began"
        )
    if "kills" in content:
        times = sum(not moment["complete"] for moment in content["kills"])
        same = "the same" if content["equal_bytes"] else "OTHER"
        console.print(f"killed {times} times and resumed: {same} bytes")
    write_json(content, json)
