"""Measurements are made once, remembered by machine and disk, and never in the way."""

import errno
import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hmt.base import json_store
from hmt.base.errors import BudgetError
from hmt.contracts.encoding import Encoding
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.engine.loading.device import device_budget
from hmt.hardware import attention_rates, device_rates, gemm_rates, machine, ram_rate
from hmt.hardware.link_rates import LinkRates
from hmt.hardware.machine import (
    HostRates,
    ProcessBytes,
    cache_file,
    machine_for,
    remember_device,
    remembered,
)
from hmt.hardware.machine_file import machine_of, machine_toml
from hmt.memory import DiskRate
from hmt.memory.device import FakeDevice
from hmt.profiling import device_process_memory, probe, probe_models, step_overheads
from hmt.profiling.probe import measure, measure_device
from hmt.profiling.process_memory import process_bytes
from hmt.quant import Format

DISK = DiskRate("direct", 2 << 20, 8, 3e9)
GEMM = {"w4a8@1": 2e10, "w4a8@512": 5e11}
PROCESS = ProcessBytes(400 << 20, 40 << 20, 10 << 20)


class Probe:
    """Stands in for the measuring, and counts."""

    def __init__(self, ram: float = 4e10, disk: DiskRate | None = DISK) -> None:
        self.ram, self.disk = ram, disk
        self.calls: list[str] = []

    def measure_ram(self, *, quick: bool) -> float:
        self.calls.append("ram")
        return self.ram

    def measure_disk(self, path: Path, *, quick: bool, progress: object) -> DiskRate | None:
        self.calls.append("disk")
        return self.disk


Install = Callable[[Probe], Probe]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def overheads(known: Machine) -> ComputeRates:
        return replace(known.cpu, step_overhead_s=1e-4, layer_overhead_s=3e-6)

    def install(probe_: Probe) -> Probe:
        for module in (machine, probe):
            monkeypatch.setattr(module, "measured_ram", probe_.measure_ram)
            monkeypatch.setattr(module, "measured_disk", probe_.measure_disk)
        monkeypatch.setattr(probe, "cpu_gemm_rates", lambda seconds: GEMM)
        monkeypatch.setattr(probe, "cpu_attention_rates", lambda seconds: (1e10, 2e11))
        monkeypatch.setattr(probe, "cpu_overheads", overheads)
        monkeypatch.setattr(probe, "disk_block_overhead_s", lambda known: 5e-5)
        monkeypatch.setattr(probe, "measured_process_bytes", lambda: PROCESS)
        return probe_

    return install


def test_the_first_call_measures_and_the_next_remembers(tmp_path: Path, install: Install) -> None:
    counted = install(Probe())
    first = machine_for(tmp_path)
    assert (first.cpu.read_rate, first.disk_read_rate) == (4e10, 3e9)
    assert first.cores >= 1 and first.ram_bytes > 0 and first.name
    assert machine_for(tmp_path) == first
    assert counted.calls == ["ram", "disk"]
    assert remembered(tmp_path) == HostRates(ComputeRates(4e10), DISK)


def test_measuring_anew_replaces_what_was_remembered(tmp_path: Path, install: Install) -> None:
    install(Probe())
    machine_for(tmp_path)
    fast = DiskRate("io_uring", 1 << 20, 4, 6e9)
    install(Probe(5e10, fast))
    found = measure(tmp_path, quick=False)
    cpu = ComputeRates(5e10, GEMM, 1e10, 2e11, step_overhead_s=1e-4, layer_overhead_s=3e-6)
    assert remembered(tmp_path) == HostRates(cpu, fast, 5e-5, process=PROCESS)
    assert found == machine_for(tmp_path)
    assert (found.disk_read_rate, found.process_bytes, found.cpu) == (6e9, 400 << 20, cpu)
    # A quick probe keeps what it does not measure.
    assert measure(tmp_path, quick=True).process_bytes == 400 << 20


def test_another_drive_is_measured_for_itself(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = install(Probe())
    machine_for(tmp_path)
    monkeypatch.setattr(machine, "_disk_of", lambda path: "another")
    counted.disk = DiskRate("io_uring", 1 << 20, 4, 1e9)
    assert machine_for(tmp_path).disk_read_rate == 1e9
    assert counted.calls == ["ram", "disk", "disk"]  # the memory is the same
    monkeypatch.undo()


def test_fewer_cores_are_another_machine(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    machine_for(tmp_path)
    monkeypatch.setattr(machine, "usable_threads", lambda: 1000)
    assert remembered(tmp_path) == HostRates()


def test_a_drive_that_cannot_be_measured_has_rate_0_and_is_tried_again(
    tmp_path: Path, install: Install
) -> None:
    counted = install(Probe(disk=None))
    assert machine_for(tmp_path).disk_read_rate == 0
    counted.disk = DISK
    assert machine_for(tmp_path).disk_read_rate == 3e9
    assert counted.calls == ["ram", "disk", "disk"]


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "file" / "inside"))
    assert machine_for(tmp_path).cpu.read_rate == 4e10
    assert remembered(tmp_path) == HostRates()


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "null", '{"machines": 3}', '{"machines": {"KEY": {}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": "fast"}, "disks": 3}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": 1}, "disks": {"DRIVE": {"speed": 4}}}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": NaN}, "disks": {}}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": 1, "gemm": [3]}, "disks": {}}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": 1, "attention_ops": -1}, "disks": {}}}}',
     '{"machines": {"KEY": {"cpu": {"read_rate": 1}, "disks": {}, "disk_block_overhead_s": "b"}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "disks": {}}}}',
     "[" * 5000],
)  # fmt: skip
def test_a_strange_cache_file_is_measured_over(
    tmp_path: Path, install: Install, content: str
) -> None:
    install(Probe())
    cache_file().parent.mkdir()
    content = content.replace("KEY", machine.fingerprint())
    content = content.replace("DRIVE", machine._disk_of(tmp_path))
    cache_file().write_text(content)
    assert machine_for(tmp_path).cpu.read_rate == 4e10
    assert remembered(tmp_path) == HostRates(ComputeRates(4e10), DISK)


def test_the_file_is_replaced_as_a_whole(
    tmp_path: Path, install: Install, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    machine_for(tmp_path)
    assert [path.name for path in cache.iterdir()] == ["machine.json"]
    before = cache_file().read_text()
    assert json.loads(before)["machines"]
    measure(tmp_path, quick=False)

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    known = cache_file().read_text()
    with monkeypatch.context() as patch:
        patch.setattr(json_store.os, "replace", full)
        remember_device(DeviceRates("a GPU", 0))
    assert cache_file().read_text() == known != before
    assert [path.name for path in cache.iterdir()] == ["machine.json"]


def test_a_probe_that_is_stopped_loses_nothing_and_another_version_is_read(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    measure(tmp_path, quick=False)

    def stopped(known: Machine) -> ComputeRates:
        raise KeyboardInterrupt

    before = remembered(tmp_path)
    monkeypatch.setattr(probe, "cpu_overheads", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, quick=False)
    assert remembered(tmp_path).process == before.process
    content = json.loads(cache_file().read_text())
    content["machines"][machine.fingerprint()]["cpu"]["from_the_future_s"] = 3
    cache_file().write_text(json.dumps(content))
    assert remembered(tmp_path).cpu.gemm == GEMM


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HMT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file() == tmp_path / "xdg" / "hmt" / "machine.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file() == tmp_path / "home" / ".cache" / "hmt" / "machine.json"


def test_this_machine_is_measured_for_real(tmp_path: Path) -> None:
    found = machine_for(tmp_path)
    assert 1e6 < found.disk_read_rate < 1e12
    assert found.cpu.read_rate == 0 or 1e8 < found.cpu.read_rate < 1e14
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_too_little_memory_for_a_fair_measurement_gives_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_rate, "available_host_bytes", lambda: 1 << 20)
    assert machine_for(tmp_path).cpu.read_rate == 0


def test_products_and_attention_are_measured_for_real() -> None:
    rates = gemm_rates.cpu_gemm_rates(0.01, (1, 4))
    kinds = {name.partition("@")[0] for name in rates}
    assert set(rates) == {f"{kind}@{tokens}" for kind in kinds for tokens in (1, 4)}
    assert not rates or {"bf16", "w4a8", "w8a8"} <= kinds
    assert all(1e7 < rate < 1e14 for rate in rates.values())
    read_rate, operations = attention_rates.cpu_attention_rates(0.01)
    assert read_rate == operations == 0 or (1e7 < read_rate < 1e14 and 1e7 < operations < 1e15)


def test_rates_are_bytes_with_one_token_and_operations_with_more() -> None:
    memory = torch.full((1 << 26,), 0x38, dtype=torch.uint8)
    rates = gemm_rates.gemm_rates(
        memory, [Format(Encoding.BF16)], (1, 16), lambda calls: [2.0, 4.0][: len(calls)]
    )
    numbers = 4096 * 4096
    assert rates == {"bf16@1": 2 * numbers / 2.0, "bf16@16": 2 * 16 * numbers / 4.0}


def test_overheads_of_steps_are_measured_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_overheads, "_STEPS", 16)
    monkeypatch.setattr(step_overheads, "_ROUNDS", 1)
    monkeypatch.setattr(step_overheads, "_LONG_PROMPT", 64)
    known = machine_for(tmp_path)
    # Beside busy neighbours memory may seem so slow that nothing is left of a step.
    known = replace(known, cpu=replace(known.cpu, read_rate=1e15))
    cpu = step_overheads.cpu_overheads(known)
    values = asdict(cpu)
    times = [value for name, value in values.items() if name.endswith("overhead_s")]
    assert len(times) == 4 and all(0 <= each < 1 for each in times)
    assert cpu.read_rate == known.cpu.read_rate
    assert 0 <= step_overheads.disk_block_overhead_s(replace(known, cpu=cpu)) < 1
    # Of a GPU, from an emulated one: there it is a CPU that computes.
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(1e9))
    options = {"gpus": "fake", "gpu_memory": "256MiB", "host_memory": "256MiB"}
    gpu = DeviceRates("a fake device", 1 << 28, link_rate=1e9)
    compute = step_overheads.device_overheads(replace(known, devices=(gpu,)), options)
    assert all(0 <= value < 10 for name, value in asdict(compute).items() if name.endswith("_s"))


def test_memory_of_a_process_is_measured_in_one_of_its_own() -> None:
    options = {"host_memory": "256MiB", "context": 1024}
    nbytes = process_bytes(options, probe_models.small_model, probe_models.FEW)
    assert 1 << 20 < nbytes < 1 << 31


def test_a_gpus_rates_come_from_calls_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "_MEMORY_BYTES", 1 << 26)
    monkeypatch.setattr(device_rates, "CONTEXT", 256)
    monkeypatch.setattr(device_rates, "_LAYERS", 1)
    layout = attention_rates.page_layout()  # compiled kernels, which stand in, take words
    monkeypatch.setattr(device_rates, "page_layout", lambda rows: layout)
    monkeypatch.setattr(device_rates, "TOKENS", (1, 16))

    def timed(call: Callable[[int], object], count: int, seconds: float) -> float:
        call(0)
        return 0.5

    formats = [Format(Encoding.BF16)]
    rates, sync_s = device_rates.device_rates(FakeDevice(), 0.1, formats, timed)
    assert rates.gemm == {"bf16@1": 2 * 4096 * 4096 / 0.5, "bf16@16": 32 * 4096 * 4096 / 0.5}
    assert rates.read_rate == rates.gemm["bf16@1"] and 0 < sync_s < 1
    assert rates.attention_read_rate == 2 * 256 * 8 * 256 / 0.5 and rates.attention_ops > 0


def test_what_a_driver_will_take_is_part_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, limit = FakeDevice(), 2 << 30
    before = device_budget(device, limit)
    machine_for(tmp_path)

    def probed(nbytes: int) -> None:
        remember_device(DeviceRates(device.name, 0, driver_bytes=nbytes))

    probed(1 << 30)
    assert before - device_budget(device, limit) == pytest.approx(1 << 30, rel=0.02)
    probed(2 << 30)
    with pytest.raises(BudgetError, match="less than the driver takes"):
        device_budget(device, limit)
    probed(0)
    # What it is: in a process of its own, beside tensors; there is no driver here.
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(1e9))
    monkeypatch.setattr(device_process_memory, "_SCHEMES", ("w8a8", None))
    monkeypatch.setattr(device_process_memory, "_LAYERS", 1)
    monkeypatch.setattr(probe_models, "_EXPERTS", replace(probe_models._EXPERTS, experts=8))
    monkeypatch.setattr(FakeDevice, "reserved_bytes", lambda device: device.used_bytes() - 5)
    given = {"gpus": "fake", "gpu_memory": "256MiB", "host_memory": "256MiB"}
    assert device_process_memory._measured({**given, "context": 1024}) == 5


def test_a_probed_gpu_is_written_as_a_machine_that_plans_read(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    machine_for(tmp_path)
    device = FakeDevice()
    monkeypatch.setitem(machine._links, device.name, LinkRates(25e9))
    monkeypatch.setattr(probe, "device_rates", lambda *given: (ComputeRates(1e12), 2e-5))
    overheads = ComputeRates(1e12, layer_overhead_s=1e-5)
    monkeypatch.setattr(probe, "device_overheads", lambda known, options: overheads)
    monkeypatch.setattr(probe, "measured_driver_bytes", lambda options: 1 << 29)
    monkeypatch.setattr(probe, "process_bytes", lambda *given: 1 << 20)
    held = device.allocate(1 << 20)  # what this process has there can be used, too
    found = measure_device(tmp_path, device, "0", quick=False)
    (gpu,) = found.devices
    assert gpu.memory_bytes == device.used_bytes() + device.free_bytes() == 1 << 40
    assert (gpu.compute, gpu.sync_overhead_s, gpu.driver_bytes) == (overheads, 2e-5, 1 << 29)
    assert machine_of(tomllib.loads(machine_toml(found)), "the probe's file") == found
    assert measure_device(tmp_path, device, "0", quick=True).devices[0].driver_bytes == 1 << 29
    assert machine.remembered_device(device.name).memory_bytes == 0 < held.nbytes
