"""Measurements are made once, remembered by machine and drive, and never in the way."""

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hmt.engine.cached_rates import InSteps
from hmt.engine.cpu_pace import CpuPace
from hmt.engine.device_steps import DeviceSteps
from hmt.engine.product_rates import Product, ProductRates, product_rates, rates_in
from hmt.engine.step_rates import StepRates

from hmt.base.errors import BudgetError
from hmt.contracts.encoding import Encoding
from hmt.contracts.machine import Machine
from hmt.engine import (
    EngineConfig,
    attention_windows,
    device_models,
    device_products,
    device_rates,
    device_steps,
    kept_file,
    machine,
    own_device_memory,
    pace,
)
from hmt.engine.attention_rates import AttentionRates
from hmt.engine.device_loading import device_budget
from hmt.engine.device_rates import DeviceRates
from hmt.engine.link_rates import LinkRates
from hmt.engine.machine import (
    Rates,
    cache_file,
    machine_for,
    measure,
    measure_drive_again,
    remembered,
)
from hmt.memory import DiskRate
from hmt.memory.device import PretendedDevice
from hmt.quant import Format

DISK = DiskRate("direct", 2 << 20, 8, 3e9)
ATTENTION = AttentionRates(1e10, 2e11)
STEPS = StepRates(1e-4, 2e-5, 3e-6, 1e-9, 4e-6, process_bytes=400 << 20)
PRODUCTS = ProductRates({"w4a8": 2e10}, {"w4a8": 5e11})
PACES_S = [3e-4, 1e-3, 4e-4, 1e-2]


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
        monkeypatch.setattr(machine, "product_rates", lambda *given: (PRODUCTS, PACES_S))
        monkeypatch.setattr(
            attention_windows, "attention_rates", lambda *given: (ATTENTION, PACES_S)
        )
        monkeypatch.setattr(machine, "cpu_step_rates", lambda *given, **options: STEPS)
        monkeypatch.setattr(machine, "held_rates", lambda *given: ({"1MiB": 6e10}, 2e-4))
        held = InSteps({"30MiB": 5e10}, {5e6: 1e-3})
        monkeypatch.setattr(machine, "cached_rates", lambda *given: held)
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
        cached_rates={"1MiB": 6e10}, pace=CpuPace(3e-4, 1e-3 + 4e-4, 1e-2, 2e-4),
    )  # fmt: skip
    assert (found.reading_pace, found.cached_pace) == (1e-3 + 4e-4, 2e-4)
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
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {"DRIVE": {"speed": 4}}}}}',
     '{"machines": {"KEY": {"ram_read_rate": NaN, "drives": {}}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {}, "steps": {"step_s": Infinity}}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {}, "cached_rates": {"a": 1}}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {}, "attention": {"bytes_per_s": -1}}}}',
     '{"machines": {"KEY": {"ram_read_rate": 1, "drives": {}, "products": {"row_s": [3]}}}}',
     "[" * 5000],
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
        patch.setattr(kept_file.os, "replace", full)
        machine.keep_factors({"CPU": 2.0})
    assert cache_file().read_text() == known != before
    assert [path.name for path in cache.iterdir()] == ["machine.json"]


def test_a_probe_that_is_stopped_loses_nothing_and_another_version_is_read(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    measure(tmp_path, quick=False)

    def stopped(*given: object, **options: object) -> StepRates:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "cpu_step_rates", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, quick=False)
    assert remembered(tmp_path).steps == STEPS
    content = json.loads(cache_file().read_text())
    content["machines"][machine.fingerprint()]["steps"]["from_the_future_s"] = 3
    cache_file().write_text(json.dumps(content))
    assert remembered(tmp_path).steps == STEPS


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
    found, beside_s = product_rates(0.01, (4, 64), [lambda number: None])
    assert len(beside_s) <= 1 and all(0 <= each < 1e-3 for each in beside_s)
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

    def timed(products: Sequence[Product]) -> list[float]:
        shapes = [(*weights[0].shape, tokens) for weights, tokens in products]
        return [rows * (2e-8 * n + columns * 1e-10 * (1 + n / 8)) for rows, columns, n in shapes]

    found = rates_in(memory, [form], (8, 64), timed)
    near = pytest.approx
    assert found.bytes_per_s["bf16"] == near(2 / (1e-10 * 1.125))
    assert found.operations_per_s == {"bf16@8": near(16 / 2e-10), "bf16": near(128 / 9e-10)}
    assert found.row_s == {name: near(2e-8) for name in ("bf16@1", "bf16@8", "bf16")}
    assert found.cached_per_s["bf16"] == near(found.bytes_per_s["bf16"])
    assert found.cached_row_s["bf16"] == near(2e-8)

    def slow_when_long(products: Sequence[Product]) -> list[float]:
        shapes = [weights[0].shape for weights, _ in products]
        each = {4096: 2e-11, 2048: 2e-11, 512: 1e-11}
        return [rows * columns * each[columns] for rows, columns in shapes]

    found = rates_in(memory, [form], (8,), slow_when_long)
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


def test_a_gpus_attention_is_what_more_positions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    # One user and eight, behind few positions and many.
    monkeypatch.setattr(device_rates, "_MEMORY_BYTES", 1 << 24)
    monkeypatch.setattr(device_rates, "_SHORT", 32)
    monkeypatch.setattr(device_rates, "_LONG", 96)
    monkeypatch.setattr(device_rates, "_LAYERS", 1)
    times, nbytes = [1.0, 4.0, 2.0, 2.1], 4096  # bytes of a position

    def reading_rate(pages: torch.Tensor, layout: object, users: int, timed: object) -> float:
        assert pages.count_nonzero() == 0 and len(pages) in (2 * users, 6 * users)
        return len(pages) * 16 * nbytes / times.pop(0)

    monkeypatch.setattr(device_rates.attention_rates, "reading_rate", reading_rate)
    rates = AttentionRates(1.0, 2.0)
    monkeypatch.setattr(device_rates.attention_rates, "rates_in", lambda *given: rates)
    known = DeviceSteps(step_s=7.0)
    machine = Machine("", 1, 1 << 30, 1e10, 0.0)
    found = device_rates.device_rates(
        PretendedDevice(), machine, 0.1, gpu_id="", formats=[], known=known
    )
    assert not times and found.steps is known and found.attention.operations_per_s == 2.0
    assert found.attention.bytes_per_s == pytest.approx(64 * nbytes / 3)
    assert found.attention.several_bytes_per_s == pytest.approx(8 * 64 * nbytes / 1.05), "a half"


def test_a_cpu_that_has_become_slower_takes_longer_for_what_it_launches() -> None:
    steps = DeviceSteps(step_s=1.0, prompt_s=2.0, bring_s=3.0, piece_s=7.0, pace=0.5)
    steps = replace(steps, device_step_s=4.0)
    known = replace(steps, device_launches={"bf16": 5.0}, device_layers={"bf16": 6.0})
    found = pace.at_pace(known.of(Machine("", 1, 1 << 30, 1e10, 0.0)), 1.0)
    assert (found.step_s, found.prompt_s, found.bring_s, found.pace) == (2.0, 4.0, 6.0, 1.0)
    assert found.piece_s == 14.0
    assert found.device_launches == {"bf16": 10.0}
    assert (found.device_step_s, found.device_layers) == (4.0, {"bf16": 6.0}), "the GPU is the same"
    assert pace.at_pace(found, 0.5).step_s == 1.0
    assert pace.at_pace(replace(found, pace=0.0), 0.5).step_s == 2.0
    assert 0 < pace.pace_s() < 1


def test_what_is_measured_while_the_pace_changes_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces, found = [1.0, 2.0, 2.0, 1.0, 1.1, 1.0], iter("abc")
    monkeypatch.setattr(pace, "pace_of", lambda model: paces.pop(0))
    assert pace.steadily(Any, lambda: next(found)) == (1.1, "c")
    paces, found = [1.0, 2.0, 3.0, 4.0], iter("ab")
    assert pace.steadily(Any, lambda: next(found), attempts=2) == (3.0, "b")


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


def test_layers_of_a_gpu_are_timed_without_what_narrow_ones_take() -> None:
    memory = torch.full((1 << 24,), 0x38, dtype=torch.uint8)
    forms = [Format(Encoding.BF16), Format(Encoding.INT4_GROUP, 32)]
    times: list[float] = []

    def timed(call: Callable[[int], object], count: int, seconds: float) -> float:
        for number in range(count):
            call(number)
        return times.pop(0)

    wide, narrow = (768, 768, 256, 1024), device_products.NARROW
    times += [5.0, 1.0, 9.0, 2.0, 8.0, 8.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0]
    with torch.inference_mode():
        found = device_products.layer_rates(memory, forms, (8, 16), 0.0, timed, wide=wide)
    assert not times

    def numbers(sizes: tuple[int, int, int, int]) -> int:
        hidden, query, kv, between = sizes
        return hidden * (2 * query + 2 * kv + 3 * between)

    more = numbers(wide) - numbers(narrow)
    assert found.bytes_per_s["bf16"] == pytest.approx(2 * more / 4)
    assert found.bytes_per_s["w4a16"] == pytest.approx((0.5 + 2 / 32) * more / 4, rel=0.01)
    # What is no faster with narrow layers is not all of the wide one's.
    assert found.operations_per_s["bf16@8"] == pytest.approx(16 * more / 7)
    assert found.operations_per_s["bf16"] == pytest.approx(32 * more / 4)


def test_a_quick_probe_keeps_what_is_known_of_caches_and_the_pace_that_goes_with_it(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Probe())
    whole = measure(tmp_path, quick=False)
    assert (whole.cached_rates, whole.cached_pace) == ({"30MiB": 5e10}, 2e-4)
    monkeypatch.setattr(machine, "held_rates", lambda *given: ({"1MiB": 1e10}, 9e-4))
    quick = measure(tmp_path, quick=True)
    assert (quick.cached_rates, quick.cached_pace) == ({"30MiB": 5e10}, 2e-4)
