"""The command `predictions`: what the planner says of runs, and what they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hmt.cli.console import notes
from hmt.cli.formatting import file_to_write, folder_to_write

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine


def predictions(
    folder: Annotated[
        Path | None, folder_to_write("Where models are written, and kept; else they are not.")
    ] = None,
    gpu_id: Annotated[
        str | None, typer.Option(help="A GPU: its own runs instead of the CPU's.")
    ] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="Two more runs of this model. May be repeated.")
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Measure the machine first; else it is as it was remembered.")
    ] = True,
    json: Annotated[
        Path | None, file_to_write("File to write the results to, after each run.")
    ] = None,
) -> None:
    """Predict runs, run them, and compare: speed, bytes and memory."""
    import tempfile

    from hmt.cli.formatting import write_json
    from hmt_bench.predictions import content_of, cpu_cases, gpu_cases, runs_of, table

    cases = gpu_cases() if gpu_id is not None else cpu_cases(tuple(map(str, model or ())))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, notes().status("measuring") as status:
        place = folder or Path(temporary)
        machine = _machine(place, gpu_id, anew=probe)
        for run in runs_of(cases, place, status.update):
            runs.append(run)
            print(_line(run), flush=True)
            if json is not None:
                write_json(content_of(runs, machine), json)
    content = content_of(runs, machine)
    Console().print(table(content), soft_wrap=True, markup=False, highlight=False)


def _line(run: dict[str, Any]) -> str:
    predicted, measured = run["predicted"], run["measured"]
    return (
        f"{run['case']['name']:<48} {predicted['tokens_per_s']:8.1f} tokens/s predicted, "
        f"{measured['tokens_per_s']:8.1f} measured; first token {predicted['ttft_s']:.3f} s"
        f" and {measured['ttft_s']:.3f} s"
    )


def _machine(place: Path, gpu_id: str | None, *, anew: bool) -> "Machine":
    """This machine, with a GPU if one is asked for: measured `anew`, or as it is remembered."""
    from hmt.hardware.machine import machine_for, with_device
    from hmt.memory.device import open_device
    from hmt.profiling.probe import measure, measure_device

    machine = measure(place, quick=gpu_id is not None) if anew else machine_for(place)
    if gpu_id is None:
        return machine
    device = open_device(gpu_id)
    if anew:
        machine = measure_device(place, device, gpu_id, quick=False)
    else:
        machine = with_device(machine, device)
    device.empty_cache()
    return machine
