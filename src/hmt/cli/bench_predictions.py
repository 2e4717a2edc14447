"""`hmt bench predictions`: what the planner says of runs, and what they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hmt.cli.console import notes
from hmt.cli.written import file_to_write, folder_to_write, write_text

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine


def predictions(
    folder: Annotated[
        Path | None, folder_to_write("Where models are written, and kept; else they are not.")
    ] = None,
    gpu_id: Annotated[
        str | None, typer.Option(help="A GPU: its own runs instead of the CPU's.")
    ] = None,
    moe: Annotated[
        Path | None, typer.Option(help="A trained mixture of experts, for three more runs.")
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Measure the machine first; else it is as it was remembered.")
    ] = True,
    rounds: Annotated[
        int, typer.Option(min=1, help="All runs so often, in turn; the middle of each counts.")
    ] = 1,
    svg: Annotated[Path | None, file_to_write("File for a picture.")] = None,
    json: Annotated[
        Path | None, file_to_write("File to write the results to, after each run.")
    ] = None,
) -> None:
    """Predict runs, run them, and compare: speed, bytes and memory."""
    import tempfile

    from hmt.bench.predictions import cpu_cases, gpu_cases, scatter_svg, table
    from hmt.bench.predictions.compare import content_of, runs_of
    from hmt.cli.bench import write_json

    cases = cpu_cases(None if moe is None else str(moe)) if gpu_id is None else gpu_cases()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, notes().status("measuring") as status:
        place = folder or Path(temporary)
        for number in range(rounds):
            machine = _machine(place, gpu_id, anew=probe)
            for run in runs_of(cases, place, progress=status.update, compiled=number > 0):
                runs.append(run | {"round": number})
                print(_line(run), flush=True)
                if json is not None:
                    write_json(content_of(runs, machine), json)
    content = content_of(runs, machine)
    Console().print(table(content), soft_wrap=True, markup=False, highlight=False)
    if svg is not None:
        write_text(svg, scatter_svg([content]))


def _line(run: dict[str, Any]) -> str:
    predicted, measured = run["predicted"], run["measured"]
    return (
        f"{run['case']['name']:<48} {predicted['tokens_per_s']:8.1f} tokens/s predicted, "
        f"{measured['tokens_per_s']:8.1f} measured; first token {predicted['ttft_s']:.3f} s"
        f" and {measured['ttft_s']:.3f} s"
    )


def _machine(place: Path, gpu_id: str | None, *, anew: bool) -> "Machine":
    """This machine, with a GPU if one is asked for: measured `anew`, or as it is remembered."""
    from hmt.engine.machine import machine_for, measure, measure_device, with_device
    from hmt.memory.device import open_device

    machine = measure(place, quick=gpu_id is not None) if anew else machine_for(place)
    if gpu_id is None:
        return machine
    device = open_device(f"cuda:{gpu_id}" if gpu_id.isdecimal() else gpu_id)
    if anew:
        machine = measure_device(place, device, gpu_id, quick=False)
    else:
        machine = with_device(machine, device)
    device.trim()
    return machine
