"""`hmt probe`: measure all rates of this machine anew, and remember them."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hmt.base.errors import HMTError
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.hardware.attention_rates import cpu_attention_rates
from hmt.hardware.device_rates import FORMATS, QUICK_FORMATS, device_rates
from hmt.hardware.gemm_rates import cpu_gemm_rates
from hmt.hardware.machine import (
    HostRates,
    driver_bytes,
    machine_for,
    machine_of,
    measured_disk,
    remember,
    remember_device,
    remembered,
    with_device,
)
from hmt.hardware.numa_rates import measured_apart, numa_rates
from hmt.hardware.ram_rate import FULL_S, QUICK_S, measured_ram
from hmt.memory import DiskRate
from hmt.memory.device import Device
from hmt.profiling.device_process_memory import measured_driver_bytes
from hmt.profiling.probe_models import FEW, dense_model
from hmt.profiling.process_memory import measured_process_bytes, process_bytes
from hmt.profiling.step_overheads import cpu_overheads, device_overheads, disk_block_overhead_s


def measure(
    path: Path, *, quick: bool, progress: Callable[[DiskRate], None] | None = None
) -> Machine:
    """Measure CPU, memory and the disk that holds `path`, and remember it.

    quick      below 10 s: fewer ways to read the disk, shorter, and memory of processes as it was
    progress   is told each result of the disk
    """
    before, each_s = remembered(path), QUICK_S if quick else FULL_S
    attention_read_rate, attention_ops = cpu_attention_rates(each_s)
    rates = HostRates(
        cpu=ComputeRates(
            read_rate=measured_ram(quick=quick),
            gemm=cpu_gemm_rates(each_s),
            attention_read_rate=attention_read_rate,
            attention_ops=attention_ops,
        ),
        disk=measured_disk(path, quick=quick, progress=progress),
        numa=before.numa if quick else numa_rates(measured_apart(FULL_S)),
        process=before.process,
    )
    remember(path, rates)  # the engines of what follows ask for it
    with contextlib.suppress(HMTError):
        rates = replace(rates, cpu=cpu_overheads(machine_of(rates)))
        rates = replace(rates, disk_block_overhead_s=disk_block_overhead_s(machine_of(rates)))
        if not quick:
            rates = replace(rates, process=measured_process_bytes())
    remember(path, rates)
    return machine_of(rates)


def measure_device(path: Path, device: Device, gpu_id: str, *, quick: bool) -> Machine:
    """Measure a GPU, and remember it; the rest is as remembered.

    quick   fewer encodings; memory of processes and of the driver as it was

    Its memory is what this process has there and what is free.  Compiles kernels that were not used
    before, which may take a minute.
    """
    known_driver_bytes = driver_bytes(device.name)
    formats = QUICK_FORMATS if quick else FORMATS
    compute, sync_s = device_rates(device, QUICK_S if quick else FULL_S, formats)
    rates = DeviceRates(
        device.name,
        0,  # not remembered: what other processes take changes
        compute=compute,
        sync_overhead_s=sync_s,
        driver_bytes=known_driver_bytes,
    )
    remember_device(rates)
    options = {"gpus": gpu_id, "gpu_memory": "2GiB", "host_memory": "512MiB"}
    machine = with_device(machine_for(path), device)
    rates = replace(rates, compute=device_overheads(machine, options))
    if not quick:
        rates = replace(rates, driver_bytes=measured_driver_bytes(options))
        known = remembered(path)
        beside = process_bytes(options, dense_model, FEW)
        grown = max(known.process.process_bytes, beside)
        remember(path, replace(known, process=replace(known.process, process_bytes=grown)))
    remember_device(rates)
    machine = with_device(machine_for(path), device)
    return machine.with_device_bytes(device.used_bytes() + device.free_bytes())
