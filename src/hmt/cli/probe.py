"""`hmt probe`: how fast this machine is: its memory, its disk, its kernels, and a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import ConfigError, MissingFileError, os_reason
from hmt.base.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from hmt.contracts.machine import ComputeRates, Machine
    from hmt.memory import DiskRate


def probe(
    path: Annotated[
        Path, typer.Argument(help="A folder or file on the disk to measure; best, a checkpoint.")
    ] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Two ways of reading instead of sixty.")
    ] = False,
    gpu_id: Annotated[
        str | None,
        typer.Option(
            help="Measure this GPU, too: 0 for the first. Kernels are compiled for it, which may "
            "take a minute."
        ),
    ] = None,
    toml: Annotated[
        Path | None,
        typer.Option(help="File to write this machine to, for `hmt plan --machine` elsewhere."),
    ] = None,
) -> None:
    """Measure memory, disk, kernels and what steps cost, and save it for `plan` and `run`."""
    from rich.console import Console

    from hmt.cli.console import notes
    from hmt.engine import EngineConfig
    from hmt.engine.loading.device import open_devices
    from hmt.hardware.machine import probed
    from hmt.hardware.machine_file import machine_toml
    from hmt.profiling.probe import measure, measure_device

    if not path.exists():
        raise MissingFileError(f"{path} does not exist; give a folder on the disk to measure")
    if toml is not None:
        _write(toml, None)  # measuring takes minutes: who cannot have the file is told before
    # Refuses what is no number, and who has no GPU.
    device = next(iter(open_devices(EngineConfig.resolve(gpus=gpu_id))), None)
    before = probed()
    results: list[DiskRate] = []
    with notes().status("measuring memory") as status:

        def show(result: "DiskRate") -> None:
            results.append(result)
            status.update(f"measuring the disk: {format_rate(result.rate)}")

        machine = measure(path, quick=quick, progress=show)
        if device is not None and gpu_id is not None:
            status.update("measuring the GPU")
            machine = measure_device(path, device, gpu_id, quick=quick)
    console = Console(highlight=False)
    for line in _lines(machine, path, results, quick=quick):
        console.print(line)
    if toml is not None:
        _write(toml, machine_toml(machine))
        console.print(f"[dim]written to {toml}[/]")
    console.print(_saved_line(machine, changed=probed() != before), soft_wrap=True)


def _lines(
    machine: "Machine", path: Path, results: "list[DiskRate]", *, quick: bool
) -> "Iterator[str | Table]":
    """All that was found, for a console."""
    from hmt.hardware.machine import remembered
    from hmt.memory import best_of

    yield f"{machine.name}, {machine.cores} cores, {format_bytes(machine.ram_bytes)} of RAM"
    rate = format_rate(machine.cpu.read_rate) if machine.cpu.read_rate else "not measured"
    yield f"memory, all cores reading:  [bold]{rate}[/]"
    yield from _node_lines(machine)
    if not results:
        yield (
            f"disk of {path}: [yellow]not measured[/]; it needs a file of 64 MiB or more there, "
            "or the right to write one"
        )
    else:
        best = remembered(path).disk or best_of(results)
        yield (
            f"disk of {path}:  [bold]{format_rate(best.rate)}[/] with {best.reader}, "
            f"{best.depth} reads of {format_bytes(best.block_bytes)} at a time"
        )
        if not quick:
            for reader in dict.fromkeys(result.reader for result in results):
                yield _table([r for r in results if r.reader == reader], best)
    yield from [*_rate_lines(machine.cpu), *_step_lines(machine)]
    for device in machine.devices:
        yield f"[bold]{device.name}[/]"
        yield from _rate_lines(device.compute)


def _saved_line(machine: "Machine", *, changed: bool) -> str:
    """Whether later runs will know it; `changed` says whether the cache file has."""
    from hmt.hardware.machine import cache_file

    if not machine.cpu.read_rate:
        return "[yellow]not saved[/]: that needs the rate of memory at least"
    if changed:
        return f"[dim]saved in {cache_file()}[/]"
    return (
        f"[yellow]not saved[/]: {cache_file()} cannot be written; HMT_CACHE can name another folder"
    )


def _write(file: Path, text: str | None) -> None:
    """Replace a file's content; None: only find out whether that can be.  Raises ConfigError."""
    try:
        with file.expanduser().open("a" if text is None else "w", encoding="utf-8") as output:
            output.write(text or "")
    except OSError as error:
        raise ConfigError(
            f"the machine cannot be written to {file} ({os_reason(error)}): name another file"
        ) from None


def _node_lines(machine: "Machine") -> list[str]:
    """NUMA nodes, where there are several."""
    if machine.numa_nodes < 2:
        return []
    rows = "; ".join(
        f"from node {node}: {' '.join(map(str, row))}"
        for node, row in enumerate(machine.numa_distances)
    )
    share = f"{machine.remote_share:.0%}" if machine.remote_share < 1 else "not measured, or all"
    return [
        f"{machine.numa_nodes} NUMA nodes, distances {rows or 'not known'}",
        f"  of its own memory's rate another node's gives a node's cores: [bold]{share}[/]",
    ]


def _rate_lines(rates: "ComputeRates") -> list[str]:
    """Products and attention of a processor."""
    lines = [
        f"products with {key.removesuffix('@1')}: [bold]{format_rate(read_rate)}[/] for one token, "
        f"{rates.gemm.get(key.removesuffix('@1') + '@512', 0) / 1e9:.0f} G operations/s for 512"
        for key, read_rate in rates.gemm.items()
        if key.endswith("@1")
    ]
    if rates.attention_read_rate:
        lines.append(
            f"attention: [bold]{format_rate(rates.attention_read_rate)}[/] for one token, "
            f"{rates.attention_ops / 1e9:.0f} G operations/s for many"
        )
    return lines


def _step_lines(machine: "Machine") -> list[str]:
    """Overheads that depend on no bytes."""
    cpu = machine.cpu
    if not cpu.step_overhead_s:
        return []
    process = ""
    if machine.process_bytes:
        process = f"; a process with a model grows by {format_bytes(machine.process_bytes)}"
    return [
        f"a step: [bold]{format_seconds(cpu.step_overhead_s)}[/] beyond what it reads and "
        f"computes, {format_seconds(cpu.sequence_overhead_s)} for each sequence, "
        f"{format_seconds(cpu.layer_overhead_s)} for each layer{process}"
    ]


def _table(results: "list[DiskRate]", best: "DiskRate") -> "Table":
    """Rates of one reader; what was measured twice shows the second one."""
    from rich.table import Table

    rates = {(result.block_bytes, result.depth): result.rate for result in results}
    chosen = (best.block_bytes, best.depth) if best.reader == results[0].reader else None
    title = f"{results[0].reader}: size of one read, by reads at a time"
    table = Table(title=title, title_justify="left")
    depths = sorted({depth for _, depth in rates})
    table.add_column("", justify="right")
    for depth in depths:
        table.add_column(str(depth), justify="right")
    for block_bytes in sorted({block for block, _ in rates}):
        cells = []
        for depth in depths:
            rate = rates.get((block_bytes, depth))
            text = "" if rate is None else format_rate(rate)
            cells.append(f"[bold green]{text}[/]" if (block_bytes, depth) == chosen else text)
        table.add_row(format_bytes(block_bytes), *cells)
    return table
