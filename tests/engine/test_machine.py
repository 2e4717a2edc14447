"""Measurements are made once, remembered by machine and drive, and never in the way."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hmt.base.errors import BudgetError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.engine import EngineConfig, device_models, device_steps, machine, own_device_memory
from hmt.engine.attention_rates import AttentionRates
from hmt.engine.device_loading import device_budget
from hmt.engine.device_rates import DeviceRates
from hmt.engine.device_steps import DeviceSteps
from hmt.engine.link_rates import LinkRates
from hmt.engine.machine import (
    Rates,
    cache_file,
    machine_for,
    measure,
    measure_drive_again,
    remembered,
)
from hmt.engine.product_rates import ProductRates, product_rates, rates_in
from hmt.engine.step_rates import StepRates
from hmt.memory import DiskRate
from hmt.memory.device import PretendedDevice
from hmt.quant import Format

DISK = DiskRate("direct", 2 << 20, 8, 3e9)
ATTENTION = AttentionRates(1e10, 2e11)
STEPS = StepRates(1e-4, 2e-5, 3e-6, 1e-9, 4e-6, process_bytes=400 << 20)
PRODUCTS = ProductRates({"w4a8": 2e10}, {"w4a8": 5e11})


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
    def install(probe: Probe) -> Probe:
        monkeypatch.setattr(machine, "_measure_ram", probe.measure_ram)
        monkeypatch.setattr(machine, "_measure_disk", probe.measure_disk)
        monkeypatch.setattr(machine, "product_rates", lambda *given: PRODUCTS)
        monkeypatch.setattr(machine, "attention_rates", lambda seconds: ATTENTION)
        monkeypatch.setattr(machine, "cpu_step_rates", lambda known, seconds, whole: STEPS)
        monkeypatch.setattr(machine, "_measure_cached", lambda: {"1MiB": 6e10})
        monkeypatch.setattr(machine, "cached_rates", lambda known, seconds: {"30MiB": 5e10})
        return probe

    return install


def test_the_first_call_measures_and_the_next_remembers(tmp_path: Path, install: Install) -> None:
    probe = install(Probe())
    first = machine_for(tmp_path)
    assert (first.ram_read_rate, first.disk_read_rate) == (4e10, 3e9)
    assert first.cores >= 1 and first.ram_bytes > 0 and first.name
    assert machine_for(tmp_path) == first
    assert probe.calls == ["ram", "disk"]
    assert remembered(tmp_path) == Rates(4e10, DISK)


def test_measuring_anew_replaces_what_was_remembered(tmp_path: Path, install: Install) -> None:
    install(Probe())
    machine_for(tmp_path)
    install(Probe(5e10, DiskRate("io_uring", 1 << 20, 4, 6e9)))
    found = measure(tmp_path, quick=True)
    assert found.disk_read_rate == 6e9 and found.cpu_ops == {"w4a8": 5e11}
    assert (found.cpu_attention_rate, found.step_s, found.process_bytes) == (1e10, 1e-4, 400 << 20)
    assert remembered(tmp_path) == Rates(
        5e10, DiskRate("io_uring", 1 << 20, 4, 6e9), PRODUCTS, ATTENTION, STEPS,
        cached_rates={"1MiB": 6e10},
    )  # fmt: skip
    assert machine_for(tmp_path).cpu_rates == {"w4a8": 2e10}


def test_a_drive_is_timed_again_as_it_is_read(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_drive_again(tmp_path, 0.01) == 0, "nothing is known of it"
    install(Probe())
    machine_for(tmp_path)
    seen: list[tuple[Any, ...]] = []

    def disk_rate(file: Path, *way: Any) -> DiskRate:
        seen.append(way)
        return replace(DISK, rate=1.5e9)

    monkeypatch.setattr(machine, "disk_rate", disk_rate)
    assert measure_drive_again(tmp_path, 0.01) == 1.5e9
    assert seen == [(DISK.reader, DISK.block_bytes, DISK.depth, 0.01)]
    assert machine_for(tmp_path).disk_read_rate == 1.5e9
    assert machine_for(tmp_path).ram_read_rate == 4e10


def test_another_drive_is_measured_for_itself(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = install(Probe())
    machine_for(tmp_path)
    monkeypatch.setattr(machine, "_drive", lambda path: "another")
    probe.disk = DiskRate("io_uring", 1 << 20, 4, 1e9)
    assert machine_for(tmp_path).disk_read_rate == 1e9
    assert probe.calls == ["ram", "disk", "disk"]  # the memory is the same
    monkeypatch.undo()


def test_fewer_cores_are_another_machine(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    machine_for(tmp_path)
    monkeypatch.setattr(machine, "usable_threads", lambda: 1000)
    assert remembered(tmp_path) == Rates()


def test_a_drive_that_cannot_be_measured_has_rate_0_and_is_tried_again(
    tmp_path: Path, install: Install
) -> None:
    probe = install(Probe(disk=None))
    assert machine_for(tmp_path).disk_read_rate == 0
    probe.disk = DISK
    assert machine_for(tmp_path).disk_read_rate == 3e9
    assert probe.calls == ["ram", "disk", "disk"]


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "file" / "inside"))
    assert machine_for(tmp_path).ram_read_rate == 4e10
    assert remembered(tmp_path) == Rates()


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "null", '{"machines": 3}', '{"machines": {"KEY": {}}}',
     '{"machines": {"KEY": {"ram_read_rate": "fast", "drives": 3}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {"DRIVE": {"speed": 4}}}}}'],
)  # fmt: skip
def test_a_strange_cache_file_is_measured_over(
    tmp_path: Path, install: Install, content: str
) -> None:
    install(Probe())
    cache_file().parent.mkdir()
    content = content.replace("KEY", machine.fingerprint())
    content = content.replace("DRIVE", machine._drive(tmp_path))
    cache_file().write_text(content)
    assert machine_for(tmp_path).ram_read_rate == 4e10
    assert remembered(tmp_path) == Rates(4e10, DISK)


def test_the_file_is_replaced_as_a_whole(tmp_path: Path, install: Install, cache: Path) -> None:
    install(Probe())
    machine_for(tmp_path)
    assert [path.name for path in cache.iterdir()] == ["machine.json"]
    assert json.loads(cache_file().read_text())["machines"]


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
    assert found.ram_read_rate == 0 or 1e8 < found.ram_read_rate < 1e14
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_too_little_memory_for_a_fair_measurement_gives_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_host_bytes", lambda: 1 << 20)
    assert machine_for(tmp_path).ram_read_rate == 0


def test_products_are_measured_for_real() -> None:
    found = product_rates(0.01, (4, 64))
    many = {name for name in found.operations_per_s if "@" not in name}
    assert set(found.bytes_per_s) == many
    assert set(found.operations_per_s) == many | {f"{name}@4" for name in many}
    assert not found.bytes_per_s or {"bf16", "w4a8", "w8a8"} <= set(found.bytes_per_s)
    assert all(1e7 < rate < 1e14 for rate in found.bytes_per_s.values())
    assert set(found.row_s) == set(found.operations_per_s) | {f"{name}@1" for name in many}
    assert set(found.cached_per_s) == many
    assert all(0 <= taken < 1e-3 for taken in found.row_s.values())


def test_rows_and_weights_are_told_apart() -> None:
    form, memory = Format(Encoding.BF16), torch.zeros(1 << 26, dtype=torch.uint8)

    def timed(weights: list[WeightTensor], tokens: int, seconds: float) -> float:
        rows, columns = weights[0].shape
        return rows * (2e-8 * tokens + columns * 1e-10 * (1 + tokens / 8))

    found = rates_in(memory, [form], (8, 64), 0.0, timed, rows=True)
    near = pytest.approx
    assert found.bytes_per_s["bf16"] == near(2 / (1e-10 * 1.125))
    assert found.operations_per_s == {"bf16@8": near(16 / 2e-10), "bf16": near(128 / 9e-10)}
    assert found.row_s == {name: near(2e-8) for name in ("bf16@1", "bf16@8", "bf16")}

    def slow_when_long(weights: list[WeightTensor], tokens: int, seconds: float) -> float:
        rows, columns = weights[0].shape
        return rows * columns * (2e-11 if columns == 4096 else 1e-11)

    found = rates_in(memory, [form], (8,), 0.0, slow_when_long, rows=True)
    assert set(found.row_s.values()) == {0.0}
    assert found.operations_per_s["bf16"] == near(16 / 2**0.5 / 1e-11)


def test_steps_of_a_gpu_are_measured_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine._links, "a pretended device", LinkRates(1e9))
    monkeypatch.setattr(device_models, "_EXPERTS", 8)
    monkeypatch.setattr(device_models, "VOCABULARY", 512)
    monkeypatch.setattr(device_steps, "_USERS", (1, 2))
    models = {kind: (small, 1, 2) for kind, (small, _, _) in device_steps._MODELS.items()}
    monkeypatch.setattr(device_steps, "_MODELS", models)
    given = {"gpu_id": "pretended", "gpu_memory": "256MiB", "host_memory": "256MiB"}
    here = replace(machine_for(tmp_path), device_name="pretended", link_rate=1e9)
    found = device_steps.device_steps(here, 1e-3, given, whole=False, schemes=["bf16"])
    assert set(found.device_layers) == {"bf16", "bf16@2", "bf16 experts", "bf16 experts@2"}
    assert set(found.device_launches) == {"bf16", "bf16 experts"}
    assert 0 <= found.logit_s < 1e-6 and found.context_bytes == 0
    values = asdict(found)
    times = [*values.pop("device_layers").values(), *values.pop("device_launches").values()]
    assert all(0 <= each < 10 for each in (*values.values(), *times))
    assert found.of(here).device_launches == found.device_launches
    # Slower by a factor are those of the CPU; memory that was not measured again is kept.
    slower = replace(found, step_s=2.0, logit_s=3.0).slower(2)
    assert (slower.step_s, slower.logit_s, slower.device_layers) == (4, 3, found.device_layers)
    assert found.completed(replace(found, context_bytes=7)).context_bytes == 7


def test_a_straight_line_through_few_users_and_many() -> None:
    assert device_steps._line({1: 3.0, 8: 10.0, 32: 34.0}) == pytest.approx((2.0, 1.0))
    assert device_steps._line({1: 5.0}) == (5.0, 0.0)
    step_s, row_s = device_steps._line({1: 4.0, 8: 3.0, 32: 4.0})
    assert step_s > 0 and row_s >= 0


def test_what_a_driver_will_take_is_part_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, config = PretendedDevice(), EngineConfig.resolve(gpu_id="0", gpu_memory="2GiB")
    before = device_budget(device, config)
    machine_for(tmp_path)

    def probed(nbytes: int) -> None:
        content = json.loads(cache_file().read_text())
        rates = asdict(DeviceRates(steps=DeviceSteps(context_bytes=nbytes)))
        content["machines"][machine.fingerprint()]["devices"] = {device.name: rates}
        cache_file().write_text(json.dumps(content))

    probed(1 << 30)
    assert before - device_budget(device, config) == pytest.approx(1 << 30, rel=0.02)
    probed(2 << 30)
    with pytest.raises(BudgetError, match="less than the driver takes"):
        device_budget(device, config)
    probed(0)
    # What it is: in a process of its own, beside tensors; there is no driver here.
    monkeypatch.setitem(machine._links, "a pretended device", LinkRates(1e9))
    monkeypatch.setattr(own_device_memory, "_SCHEMES", ("w8a8", None))
    monkeypatch.setattr(own_device_memory, "_LAYERS", 1)
    monkeypatch.setattr(device_models, "_EXPERTS", 8)
    monkeypatch.setattr(PretendedDevice, "kept_bytes", lambda device: device.used_bytes() - 5)
    given = {"gpu_id": "pretended", "gpu_memory": "256MiB", "host_memory": "256MiB"}
    assert own_device_memory._measured({**given, "context": 1024}) == 5
