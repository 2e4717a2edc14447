"""What this machine can do: measured once, and remembered in the user's cache folder.

What needs no engine is measured here, quickly, when a model is loaded first: memory and the disk.
`hmt probe` measures everything (profiling/probe.py).
"""

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hmt.base.errors import HMTError
from hmt.base.folders import cache_folder
from hmt.base.json_store import number_of, parse_as, write_atomically
from hmt.base.units import GIB
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.hardware.link_rates import LinkRates, link_rates
from hmt.hardware.numa_rates import NumaRates
from hmt.hardware.ram_rate import QUICK_S, measured_ram
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import (
    DiskRate,
    file_to_read,
    node_distances,
    numa_nodes,
    quick_rate,
    sweep,
)
from hmt.memory.device import Device
from hmt.quant import Format

_FULL_DISK_S = 0.12


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """See Machine; 0: not measured."""

    process_bytes: int = 0
    streaming_bytes: int = 0
    converting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostRates:
    """What is remembered of a machine without its GPUs; 0 and None where nothing was measured."""

    cpu: ComputeRates = field(default_factory=ComputeRates)
    disk: DiskRate | None = None
    disk_block_overhead_s: float = 0.0
    numa: NumaRates = field(default_factory=NumaRates)
    process: ProcessBytes = field(default_factory=ProcessBytes)


def machine_for(path: Path) -> Machine:
    """This machine, with the rates of its memory and of the disk that holds `path`.

    What is remembered is used; the rest is measured quickly (below a second) and remembered.
    Never fails for what cannot be measured: that rate is 0.
    """
    known = remembered(path)
    if not known.cpu.read_rate or known.disk is None:
        read_rate = known.cpu.read_rate or measured_ram(quick=True)
        disk = known.disk or measured_disk(path, quick=True, progress=None)
        known = replace(known, cpu=replace(known.cpu, read_rate=read_rate), disk=disk)
        remember(path, known)
    return machine_of(known)


def with_device(machine: Machine, device: Device, form: Format | None = None) -> Machine:
    """The machine with a GPU and its link, measured once per process (half a second).

    `form` is that of most weights which the CPU may compute with meanwhile.
    """
    rates = _links.get(device.name) or link_rates(device, form)
    found = replace(
        remembered_device(device.name),
        link_rate=rates.link,
        shared_link_rate=rates.shared_link,
        shared_cpu_rate=rates.shared_cpu,
    )
    return replace(machine, devices=(found,))


_links: dict[str, LinkRates] = {}  # by device, where they need not be measured


def driver_bytes(name: str) -> int:
    """What the driver and libraries take of the GPU of this `name`; 0: not known."""
    return remembered_device(name).driver_bytes


def remembered_device(name: str) -> DeviceRates:
    """Rates of the GPU of this `name` that were measured before."""
    try:
        found = dict(_own_entry()["devices"][name])
        compute = parse_as(ComputeRates, found.pop("compute"))
        return replace(parse_as(DeviceRates, found | {"name": name}), compute=compute)
    except (KeyError, TypeError, ValueError, AttributeError):
        return DeviceRates(name, 0)


def remembered(path: Path) -> HostRates:
    """Rates that were measured before, for this machine and the disk that holds `path`."""
    try:
        known = _own_entry()
        disk = known["disks"].get(_disk_of(path))
        return HostRates(
            parse_as(ComputeRates, known["cpu"]),
            parse_as(DiskRate, disk) if disk else None,
            number_of(known.get("disk_block_overhead_s", 0.0)),
            parse_as(NumaRates, known.get("numa", {})),
            parse_as(ProcessBytes, known.get("process", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return HostRates()  # nothing yet, or a file that something else has written


def remember_device(rates: DeviceRates) -> None:
    """Keep what was measured of a GPU, if it can be."""
    content, known = _load(), _own_entry()
    devices = known.get("devices")
    entry = asdict(rates)
    known["devices"] = {**(devices if isinstance(devices, dict) else {}), entry.pop("name"): entry}
    content["machines"][fingerprint()] = known
    _write(content)


def machine_of(rates: HostRates) -> Machine:
    """This machine, with `rates`."""
    read_rate = rates.numa.together or rates.cpu.read_rate
    return Machine(
        name=cpu_name(),
        cores=usable_threads(),
        ram_bytes=int(psutil.virtual_memory().total),
        cpu=replace(rates.cpu, read_rate=read_rate),
        disk_read_rate=0.0 if rates.disk is None else rates.disk.rate,
        disk_block_overhead_s=rates.disk_block_overhead_s,
        numa_nodes=len(numa_nodes()),
        numa_distances=node_distances(),
        remote_share=rates.numa.remote_share,
        **asdict(rates.process),
    )


def cache_file() -> Path:
    """Where measurements are kept."""
    return cache_folder() / "machine.json"


def cpu_name() -> str:
    """The CPU's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def probed() -> str:
    """Tells what predictions are made from; changes with each probe."""
    rates = {name: value for name, value in _own_entry().items() if name != "disks"}
    return hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()[:16]


def _own_entry() -> dict[str, Any]:
    """What the cache file says of this machine."""
    found = _load()["machines"].get(fingerprint())
    return found if isinstance(found, dict) else {}


def measured_disk(
    path: Path, *, quick: bool, progress: Callable[[DiskRate], None] | None
) -> DiskRate | None:
    """The disk that holds `path`; None when there is nothing to read, or reading fails."""
    try:
        with file_to_read(path) as file:
            if file is None:
                return None
            if quick:
                return quick_rate(file, QUICK_S, progress)
            return sweep(file, _FULL_DISK_S, progress)
    except (OSError, HMTError):
        return None


def remember(path: Path, rates: HostRates) -> None:
    """Add `rates` to the cache file, which is replaced as a whole, if it can be."""
    if not rates.cpu.read_rate:
        return  # half a measurement would be taken for a whole one
    content, known = _load(), _own_entry()
    disks, devices = known.get("disks"), known.get("devices")
    disks = disks if isinstance(disks, dict) else {}
    if rates.disk is not None:
        disks[_disk_of(path)] = asdict(rates.disk)
    content["machines"][fingerprint()] = {
        "name": cpu_name(),
        "cores": usable_threads(),
        "cpu": asdict(rates.cpu),
        "disk_block_overhead_s": rates.disk_block_overhead_s,
        "numa": asdict(rates.numa),
        "process": asdict(rates.process),
        "disks": disks,
        "devices": devices if isinstance(devices, dict) else {},
    }
    _write(content)


def _write(content: dict[str, Any]) -> None:
    """Replace the cache file as a whole, if it can be."""
    write_atomically(cache_file(), json.dumps(content, indent=1))


def _load() -> dict[str, Any]:
    """The cache file's content; an empty one where there is none that can be understood."""
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("machines"), dict):
        return {"machines": {}}
    return content


def fingerprint() -> str:
    """Changes when the measurement would: with the CPU, the cores we may use, and the memory."""
    memory_gib = round(psutil.virtual_memory().total / GIB)  # kernels keep a varying part of it
    facts = (platform.machine(), cpu_name(), str(usable_threads()), str(memory_gib))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]


def _disk_of(path: Path) -> str:
    """The mount that holds `path`: device and mount point, which outlive a reboot."""
    resolved = path.resolve()
    mounts = {}
    with contextlib.suppress(OSError):
        mounts = {Path(m.mountpoint): m.device for m in psutil.disk_partitions(all=True)}
    for folder in (resolved, *resolved.parents):
        if folder in mounts:
            return f"{mounts[folder]} on {folder}"
    return "unknown"
