"""`hmt doctor`: what of this machine HMT can use, and what is missing."""

import json as json_format
import mmap
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from hmt.base.errors import HMTError, os_reason
from hmt.base.units import format_bytes, format_rate

GOOD, POOR, BROKEN = "ok", "could be better", "broken"

_MARKS = {GOOD: "[green]✓[/]", POOR: "[yellow]·[/]", BROKEN: "[bold red]✗[/]"}
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_X86_FEATURES = {
    "avx2": "AVX2",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
}
_ARM_FEATURES = {"asimddp": "dot product", "i8mm": "I8MM", "bf16": "BF16", "sve": "SVE"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.  `state` is GOOD, POOR or BROKEN."""

    what: str
    state: str
    found: str


def doctor(
    path: Annotated[
        Path, typer.Argument(help="A folder or file on the disk that models are read from.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what of this machine HMT can use and what is missing; 1 when HMT cannot run at all."""
    findings = list(_examine(path))
    if json:
        print(json_format.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    if any(finding.state == BROKEN for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(_MARKS[finding.state], f"[bold]{finding.what}[/]", Text(finding.found))
    Console(highlight=False).print(table)


def _examine(path: Path) -> Iterator[Finding]:
    yield _python()
    torch = _torch()
    yield torch
    yield _cpu()
    if torch.state == BROKEN:
        return  # the rest needs torch
    yield _kernels()
    yield from _memory()
    yield _huge_pages()
    yield _locked_memory()
    yield _direct_reads(path)
    yield _io_uring()
    yield _gpu()
    yield _rates(path)


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    return Finding("Python", GOOD if sys.version_info >= _OLDEST_PYTHON else BROKEN, found)


def _torch() -> Finding:
    wanted = ".".join(map(str, _OLDEST_TORCH))
    try:
        installed = version("torch")
        import torch
    except (PackageNotFoundError, ImportError, OSError) as error:
        return Finding("torch", BROKEN, f"does not load ({error}); install torch {wanted} or later")
    if tuple(int(part) for part in installed.split(".")[:2]) < _OLDEST_TORCH:
        return Finding("torch", BROKEN, f"{installed}; install {wanted} or later")
    return Finding("torch", GOOD, f"{installed}, {torch.get_num_threads()} threads")


def _cpu() -> Finding:
    known = _ARM_FEATURES if platform.machine() == "aarch64" else _X86_FEATURES
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return Finding("CPU", POOR, "the kernel does not tell its features")
    flags = next((set(x.split()) for x in lines if x.startswith(("flags", "Features"))), set())
    present = [name for flag, name in known.items() if flag in flags]
    absent = [name for flag, name in known.items() if flag not in flags]
    cpus = len(os.sched_getaffinity(0))
    found = f"{cpus} CPUs to use; has {', '.join(present) or 'none of the features HMT can use'}"
    if absent:
        found += f"; not {', '.join(absent)}"
    return Finding("CPU", GOOD if present else POOR, found)


def _kernels() -> Finding:
    from hmt.kernels.cpu import extension

    try:
        native = extension.load()
    except HMTError as error:
        return Finding("compiled kernels", BROKEN, str(error))
    if native is not None:
        return Finding("compiled kernels", GOOD, _what_computes(native))
    return Finding("compiled kernels", POOR, f"not used: {_why_not_native()}; plain torch computes")


def _what_computes(native: ModuleType) -> str:
    topology = native.Topology()
    found = f"use {native.isa()}"
    others = [isa for isa in native.isas() if isa != native.isa()]
    if others:
        found += f" ({', '.join(others)} {'runs' if len(others) == 1 else 'run'} too)"
    found += f", {native.threads()} threads on {len(topology.cores)} physical cores"
    if topology.nodes > 1:
        found += f" of {topology.nodes} NUMA nodes"
    if topology.quota:
        found += f", of which the cgroup grants the time of {topology.quota:.3g}"
    return found


def _why_not_native() -> str:
    from importlib import import_module

    try:
        import_module("hmt._native")
    except ImportError as error:
        return f"{error}; install HMT where there is a C++17 compiler, with HMT_NATIVE=on"
    return "HMT_KERNELS=reference"


def _memory() -> Iterator[Finding]:
    import psutil

    from hmt.memory import available_host_bytes, cgroup_limit_bytes, numa_nodes

    total = psutil.virtual_memory().total
    yield Finding(
        "RAM", GOOD, f"{format_bytes(total)}, {format_bytes(available_host_bytes())} available"
    )
    limit = cgroup_limit_bytes()
    none = "none" if limit is None else format_bytes(limit)
    yield Finding("cgroup memory limit", GOOD, none)
    nodes = numa_nodes()
    hint = "; bind with --numa when a model fits one node" if len(nodes) > 1 else ""
    cpus = ", ".join(f"node {node}: {len(cpus)} CPUs" for node, cpus in nodes.items())
    yield Finding("NUMA", GOOD, cpus + hint)


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge pages", POOR, "the kernel has no transparent huge pages")
    setting = text.partition("[")[2].partition("]")[0]
    if setting == "never":
        return Finding("huge pages", POOR, "never; set transparent_hugepage to madvise")
    return Finding("huge pages", GOOD, setting)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return Finding("lockable memory", GOOD, f"{text}; what a GPU reads is pinned")


def _direct_reads(path: Path) -> Finding:
    folder = (path if path.is_dir() else path.parent).resolve()
    try:
        files = [path] if path.is_file() else [f for f in folder.iterdir() if f.is_file()]
        file = next((f for f in files if os.access(f, os.R_OK)), None)
        if file is None:
            return Finding("O_DIRECT", GOOD, f"not tried: {folder} holds no file")
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        found = f"refused in {folder} ({os_reason(error)}); reads go through the page cache"
        return Finding("O_DIRECT", POOR, found)
    return Finding("O_DIRECT", GOOD, f"works in {folder}")


def _io_uring() -> Finding:
    from hmt.memory.disk.uring import unavailable

    reason = unavailable()
    if reason is None:
        return Finding("io_uring", GOOD, "available")
    return Finding("io_uring", POOR, f"not used: {reason}; threads read the disk instead")


def _gpu() -> Finding:
    names = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = information.read_text().splitlines()
        names += [x.partition(":")[2].strip() for x in lines if x.startswith("Model:")]
    if not names:
        return Finding("GPU", GOOD, "none; the CPU computes alone")
    import torch

    from hmt.memory.device import gpu_is_usable

    if not gpu_is_usable():
        return Finding(
            "GPU", POOR, f"{', '.join(names)}; not used: this torch ({torch.__version__}) cannot"
        )
    found = f"{', '.join(names)}; use it with --gpu-memory"
    if Path("/proc/driver/nvidia-fs").exists():
        # What goes from the disk to a GPU is checked by its checksum, and mostly converted.
        found += "; GPUDirect Storage is there and not used: blocks pass through host memory"
    return Finding("GPU", GOOD, found)


def _rates(path: Path) -> Finding:
    from hmt.hardware.machine import remembered

    rates, what = remembered(path), "measured rates"
    if not rates.cpu.read_rate:
        return Finding(what, POOR, "none; run `hmt probe` on the disk that holds your models")
    found = f"memory {format_rate(rates.cpu.read_rate)}"
    if rates.disk is None:
        return Finding(what, POOR, f"{found}; the disk of {path} was not measured: run `hmt probe`")
    return Finding(
        what,
        GOOD,
        f"{found}, disk {format_rate(rates.disk.rate)} "
        f"({rates.disk.reader}, {rates.disk.depth} reads of "
        f"{format_bytes(rates.disk.block_bytes)} at a time)",
    )
