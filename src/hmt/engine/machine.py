"""What this machine can do: measured once, and remembered in the user's cache folder."""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from hmt.base import flags
from hmt.base.errors import HMTError
from hmt.base.units import GIB, MIB, round_down
from hmt.contracts.machine import Machine
from hmt.engine.attention_rates import AttentionRates
from hmt.engine.attention_windows import AttentionWindows
from hmt.engine.cached_rates import InSteps, cached_rates, held_rates
from hmt.engine.cpu_pace import CpuPace, Yardstick
from hmt.engine.cpu_step_rates import cpu_step_rates
from hmt.engine.device_rates import FORMATS, QUICK_FORMATS, DeviceRates, device_rates
from hmt.engine.device_steps import DeviceSteps
from hmt.engine.kept_file import number_of, of_kind, replace_file, sizes_of
from hmt.engine.link_rates import LinkRates, link_rates
from hmt.engine.numa_rates import NumaRates, measured_apart, numa_rates
from hmt.engine.pace import at_pace, pace_s
from hmt.engine.probe_models import shelf
from hmt.engine.product_rates import FULL_TOKENS, QUICK_TOKENS, ProductRates, product_rates
from hmt.engine.step_rates import StepRates, completed
from hmt.kernels.cpu import extension
from hmt.kernels.cpu.threads import usable_threads
from hmt.memory import (
    PAGE_BYTES,
    DiskRate,
    available_host_bytes,
    cache_bytes,
    disk_rate,
    file_to_read,
    node_distances,
    numa_nodes,
    quick_rate,
    ram_read_rate,
    sweep,
)
from hmt.memory.device import Device
from hmt.planner.calibration import PARTS, calibrated
from hmt.quant import Format

_QUICK_S = 0.1  # per rate
_FULL_S = 0.5
_FULL_DISK_S = 0.12
_PRODUCTS_S = 2 * _FULL_S  # of each encoding, with eight numbers of tokens and two widths
_PACE_S, _QUICK_PACE_S = 0.05, 0.02
_LOOKS = 5  # at attention
_HELD_ROUNDS = 64
_QUICK_BUFFER_BYTES = 256 * MIB
_FULL_BUFFER_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the memory and of one drive; 0 and None where nothing was measured."""

    ram_read_rate: float = 0.0
    disk: DiskRate | None = None
    products: ProductRates = field(default_factory=ProductRates)
    attention: AttentionRates = field(default_factory=AttentionRates)
    steps: StepRates = field(default_factory=StepRates)
    cached_rates: dict[str, float] = field(default_factory=dict)  # see Machine
    numa: NumaRates = field(default_factory=NumaRates)
    pace: CpuPace = field(default_factory=CpuPace)


def machine_for(path: Path) -> Machine:
    """This machine, with the rates of its memory and of the drive that holds `path`.

    What is remembered is used; the rest is measured quickly (below a second) and remembered.
    Never fails for what cannot be measured: that rate is 0.
    """
    known = remembered(path)
    if known.ram_read_rate and known.disk is not None:
        return _machine(known)
    found = replace(
        known,
        ram_read_rate=known.ram_read_rate or _measure_ram(quick=True),
        disk=known.disk or _measure_disk(path, quick=True, progress=None),
    )
    _remember(path, found)
    return _machine(found)


def with_device(machine: Machine, device: Device, form: Format | None = None) -> Machine:
    """The machine with a GPU and its link, measured once per process (half a second).

    `form` is that of most weights which the CPU may compute with meanwhile.
    """
    rates = _links.get(device.name) or link_rates(device, form)
    known = _remembered_device(device.name)
    found = factors()
    machine = replace(
        known.slower(found.get("fixed", 1.0)).of(machine),
        device_name=device.name,
        link_rate=rates.link,
        shared_link_rate=rates.shared_link,
        shared_cpu_rate=rates.shared_cpu / found.get("CPU", 1.0),
    )
    if machine.pace:
        machine = at_pace(machine, pace_s())
    return calibrated(machine, {part: found.get(part, 1.0) for part in ("GPU", "link")})


_links: dict[str, LinkRates] = {}  # by device, where they need not be measured


def measure(
    path: Path, *, quick: bool, progress: Callable[[DiskRate], None] | None = None
) -> Machine:
    """Measure anew and remember.  Unless `quick`, try many ways to read the drive (about 20 s).

    `progress` is told each result of the drive.
    """
    before, each_s = remembered(path), _QUICK_S if quick else _FULL_S
    with Yardstick() as yardstick, shelf.open():
        attention = AttentionWindows(yardstick, each_s, most=1 if quick else _LOOKS)
        attention.look()
        found = Rates(_measure_ram(quick=quick))
        attention.look()
        found = replace(found, disk=_measure_disk(path, quick=quick, progress=progress))
        attention.look()
        numa = before.numa if quick else numa_rates(measured_apart(_FULL_S))
        found = replace(found, numa=numa, **_measure_kernels(yardstick, attention, quick=quick))
        found = _with_cached(found, yardstick, before if quick else Rates())
        _remember(path, found)  # a step's engine asks for it
        with contextlib.suppress(HMTError):
            pace, held = partial(yardstick.measured, _QUICK_PACE_S if quick else _PACE_S), InSteps()
            if not quick:
                held = cached_rates(_machine(found), each_s, pace)
                found = replace(found, cached_rates=held.rates)
                _remember(path, found)
            steps = cpu_step_rates(
                _machine(found), each_s, whole=not quick, pace=pace, calls_s=held.calls_s
            )
            found = replace(found, steps=completed(steps, before.steps))
    _remember(path, found)
    return _machine(found)


def measure_drive_again(path: Path, seconds: float) -> float:
    """The drive's rate at this moment, read as it is known to be read best; remembered.

    A drive that others use, too, gives much more at one time than at another.  0 where it cannot
    be measured.
    """
    known = remembered(path)
    try:
        with file_to_read(path) as file:
            if file is None or known.disk is None:
                return 0.0
            way = known.disk
            found = disk_rate(file, way.reader, way.block_bytes, way.depth, seconds)
    except (OSError, HMTError):
        return 0.0
    _remember(path, replace(known, disk=found))
    return found.rate


def measure_device(path: Path, device: Device, gpu_id: str, *, quick: bool) -> Machine:
    """Measure a GPU anew, and remember it; the rest is as remembered.

    If `quick`, what steps cost is kept as it was measured before, if it was.

    Compiles kernels that were not used before, which may take a minute.
    """
    machine = with_device(machine_for(path), device)
    formats = QUICK_FORMATS if quick else FORMATS
    before = _remembered_device(device.name).steps
    found = device_rates(
        device, machine, _QUICK_S if quick else _FULL_S, gpu_id=gpu_id, formats=formats,
        whole=not quick, known=before if quick and before.device_layers else None,
    )  # fmt: skip
    found = replace(found, steps=found.steps.completed(before))
    content, known = _load(), _own_entry()
    devices = known.get("devices")
    known["devices"] = devices if isinstance(devices, dict) else {}
    known["devices"][device.name] = asdict(found)
    known.pop("factors", None)  # of what was measured before
    content["machines"][fingerprint()] = known
    _write(content)
    return with_device(machine_for(path), device)


def context_bytes(name: str) -> int:
    """What the driver and libraries take of the GPU of this `name`; 0: not known."""
    return _remembered_device(name).steps.context_bytes


def _remembered_device(name: str) -> DeviceRates:
    try:
        found = _load()["machines"][fingerprint()]["devices"][name]
        return DeviceRates(
            number_of(found["read_rate"]),
            number_of(found["sync_s"]),
            of_kind(ProductRates, found["products"]),
            of_kind(AttentionRates, found["attention"]),
            of_kind(DeviceSteps, found["steps"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return DeviceRates()


def remembered(path: Path) -> Rates:
    """Rates that were measured before, for this machine and the drive that holds `path`."""
    try:
        machine = _load()["machines"][fingerprint()]
        drive = machine["drives"].get(_drive(path))
        return Rates(
            number_of(machine["ram_read_rate"]),
            of_kind(DiskRate, drive) if drive else None,
            of_kind(ProductRates, machine.get("products", {})),
            of_kind(AttentionRates, machine.get("attention", {})),
            of_kind(StepRates, machine.get("steps", {})),
            sizes_of(machine.get("cached_rates", {})),
            numa=of_kind(NumaRates, machine.get("numa", {})),
            pace=of_kind(CpuPace, machine.get("pace", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return Rates()  # nothing yet, or a file that something else has written


def cache_folder() -> Path:
    """HMT's own folder: HMT_CACHE, else hmt in the user's cache folder.  It may not exist yet."""
    folder = flags.read(flags.CACHE)
    if folder:
        return Path(folder)
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "hmt"


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


def _machine(rates: Rates) -> Machine:
    machine = Machine(
        name=cpu_name(),
        cores=usable_threads(),
        ram_bytes=int(psutil.virtual_memory().total),
        ram_read_rate=rates.numa.together or rates.ram_read_rate,
        disk_read_rate=0.0 if rates.disk is None else rates.disk.rate,
        disk_flight_bytes=0 if rates.disk is None else rates.disk.in_flight_bytes,
        cpu_rates=rates.products.bytes_per_s,
        cpu_ops=rates.products.operations_per_s,
        cpu_row_s=rates.products.row_s,
        cache_bytes=cache_bytes(),
        cached_rates=rates.cached_rates,
        cpu_cached_rates=rates.products.cached_per_s,
        cpu_cached_row_s=rates.products.cached_row_s,
        cpu_attention_rate=rates.attention.bytes_per_s,
        cpu_cached_attention_rate=rates.attention.cached_per_s,
        cpu_attention_cold_s=rates.attention.cold_s,
        cpu_attention_short_rate=rates.attention.short_bytes_per_s,
        cpu_cached_attention_short_rate=rates.attention.short_cached_per_s,
        cpu_attention_ops=rates.attention.operations_per_s,
        cpu_attention_short_ops=rates.attention.short_operations_per_s,
        **asdict(rates.steps),
        pace=rates.pace.calls_s,
        reading_pace=rates.pace.reading_s,
        arithmetic_pace=rates.pace.arithmetic_s,
        cached_pace=rates.pace.cached_s,
        numa_nodes=len(numa_nodes()),
        numa_distances=node_distances(),
        remote_share=rates.numa.remote_share,
    )
    return calibrated(machine, factors())


def factors() -> dict[str, float]:
    """What runs have shown the times of each kind to be, over what is measured; often none."""
    try:
        found = _load()["machines"][fingerprint()]["factors"]
        known = {part: number_of(found[part]) for part in PARTS}
        return known if all(known.values()) else {}
    except (KeyError, TypeError, ValueError):
        return {}


def probed() -> str:
    """Tells what predictions are made from; changes with each probe."""
    rates = {
        name: value for name, value in _own_entry().items() if name not in ("factors", "drives")
    }
    return hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()[:16]


def keep_factors(found: Mapping[str, float]) -> None:
    """Let all later predictions be made with them; none: with none."""
    content = _load()
    content["machines"][fingerprint()] = {**_own_entry(), "factors": dict(found)}
    _write(content)


def _own_entry() -> dict[str, Any]:
    """What the cache file says of this machine."""
    found = _load()["machines"].get(fingerprint())
    return found if isinstance(found, dict) else {}


def _measure_ram(*, quick: bool) -> float:
    """The rate at which all cores together read memory that no cache holds; 0 when unknown."""
    # Caches keep a part of what is read again and again: with a buffer of four times their size
    # the rate came out 10 to 30% too high, with eight times it agreed with much larger ones.
    caches, available = cache_bytes(), available_host_bytes()
    if quick:
        # Twice the caches at least: some servers have more cache than a quick buffer is large.
        most = min(4 * caches, max(_QUICK_BUFFER_BYTES, 2 * caches), available // 8)
    else:
        most = min(8 * caches, max(_FULL_BUFFER_BYTES, 4 * caches), available // 4)
    if most < caches:
        return 0.0  # the rate of the cache would be all that shows
    read, restore = reader()
    try:
        return ram_read_rate(read, round_down(most, PAGE_BYTES), _QUICK_S if quick else _FULL_S)
    except OSError:
        return 0.0
    finally:
        restore()


def _measure_kernels(
    yardstick: Yardstick, attention: AttentionWindows, *, quick: bool
) -> dict[str, Any]:
    """Products, attention, and the pace that the CPU had when products were measured."""
    seconds, tokens = (_QUICK_S, QUICK_TOKENS) if quick else (_PRODUCTS_S, FULL_TOKENS)
    attention.look()
    products, products_s = product_rates(seconds, tokens, yardstick.calls())
    attention.look()
    pace = yardstick.with_rates(yardstick.pace(products_s), products)
    return {"products": products, "attention": attention.rates(pace), "pace": pace}


def _with_cached(found: Rates, yardstick: Yardstick, before: Rates) -> Rates:
    """With rates of weights that caches hold, and the pace they go with: as `before`, if known."""
    if before.cached_rates and before.pace.cached_s:
        rates, cached_s = before.cached_rates, before.pace.cached_s
    else:
        held = partial(yardstick.held, rounds=_HELD_ROUNDS)
        rates, cached_s = held_rates(held, found.products, found.ram_read_rate)
    return replace(found, cached_rates=rates, pace=replace(found.pace, cached_s=cached_s))


def reader() -> tuple[Callable[[torch.Tensor], object], Callable[[], None]]:
    """A function that reads a uint8 tensor with all cores, and one that restores the threads."""
    native = extension.load()
    if native is not None:
        before = native.threads()
        native.set_threads(usable_threads())
        return (
            lambda memory: native.sum_words(memory.data_ptr(), memory.nbytes // 8),
            lambda: native.set_threads(before),
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_threads())
    return (
        lambda memory: memory.view(torch.int64).sum(),
        lambda: torch.set_num_threads(threads),
    )


def _measure_disk(
    path: Path, *, quick: bool, progress: Callable[[DiskRate], None] | None
) -> DiskRate | None:
    """The drive that holds `path`; None when there is nothing to read, or reading fails."""
    try:
        with file_to_read(path) as file:
            if file is None:
                return None
            if quick:
                return quick_rate(file, _QUICK_S, progress)
            return sweep(file, _FULL_DISK_S, progress)
    except (OSError, HMTError):
        return None


def _remember(path: Path, rates: Rates) -> None:
    """Add `rates` to the cache file, which is replaced as a whole, if it can be."""
    if not rates.ram_read_rate:
        return  # half a measurement would be taken for a whole one
    content = _load()
    known = content["machines"].get(fingerprint())
    drives = known.get("drives") if isinstance(known, dict) else None
    drives = drives if isinstance(drives, dict) else {}
    if rates.disk is not None:
        drives[_drive(path)] = asdict(rates.disk)
    devices = known.get("devices") if isinstance(known, dict) else None
    # A probe may be stopped before it comes to them.
    steps = rates.steps if rates.steps != StepRates() else remembered(path).steps
    content["machines"][fingerprint()] = {
        "name": cpu_name(),
        "cores": usable_threads(),
        "ram_read_rate": rates.ram_read_rate,
        "products": asdict(rates.products),
        "attention": asdict(rates.attention),
        "steps": asdict(steps),
        "cached_rates": rates.cached_rates,
        "numa": asdict(rates.numa),
        "pace": asdict(rates.pace),
        "drives": drives,
        "devices": devices if isinstance(devices, dict) else {},
    }
    _write(content)


def _write(content: dict[str, Any]) -> None:
    """Replace the cache file as a whole, if it can be."""
    replace_file(cache_file(), json.dumps(content, indent=1))


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


def _drive(path: Path) -> str:
    """The mount that holds `path`: device and mount point, which outlive a reboot."""
    resolved = path.resolve()
    mounts = {}
    with contextlib.suppress(OSError):
        mounts = {Path(m.mountpoint): m.device for m in psutil.disk_partitions(all=True)}
    for folder in (resolved, *resolved.parents):
        if folder in mounts:
            return f"{mounts[folder]} on {folder}"
    return "unknown"
