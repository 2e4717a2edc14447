"""Rates of link and CPU: measured with weights of any format, once, and used by the planner."""

from dataclasses import replace

import pytest

from hmt.contracts.encoding import Activations, Encoding
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.hardware import link_rates, machine
from hmt.memory.device import FakeDevice
from hmt.planner.placement.device import copied_share
from hmt.quant import Format

MACHINE = Machine("a machine", 4, 1 << 34, 1e9, ComputeRates(100e9))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "_SHAPE", (128, 128))
    monkeypatch.setattr(link_rates, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(link_rates, "_SECONDS", 0.01)
    monkeypatch.setattr(link_rates, "cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(link_rates, "_known", {})


@pytest.mark.parametrize(
    "form",
    [
        Format(Encoding.BF16),
        Format(Encoding.F32),
        Format(Encoding.FP8_BLOCK, tile=(128, 128)),
        Format(Encoding.INT8_CHANNEL, activations=Activations.INT8_TOKEN),
        Format(Encoding.INT4_GROUP, 32, activations=Activations.INT8_TOKEN),
        Format(Encoding.INT4_GROUP, 32, zeros=True),
        Format(Encoding.NVFP4, 16),
        Format(Encoding.MXFP4, 32),
    ],
)
def test_every_format_has_rates(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.with_device(MACHINE, FakeDevice(), form)
    (gpu,) = found.devices
    assert gpu.name == "a fake device"
    assert gpu.link_rate > 0 and gpu.shared_cpu_rate > 0
    monkeypatch.setattr(link_rates, "_measure", None)  # not again
    assert machine.with_device(MACHINE, FakeDevice(), form) == found


def test_a_model_without_networks_needs_only_the_link() -> None:
    found = machine.with_device(MACHINE, FakeDevice())
    (gpu,) = found.devices
    assert gpu.link_rate > 0 and gpu.shared_cpu_rate == gpu.shared_link_rate == 0


def test_the_plan_divides_by_the_rates_at_once() -> None:
    alone = DeviceRates("a GPU", 1 << 30, link_rate=50e9)
    assert copied_share(replace(MACHINE, devices=(alone,))) == pytest.approx(1 / 3)
    both = replace(alone, shared_link_rate=40e9, shared_cpu_rate=40e9)
    assert copied_share(replace(MACHINE, devices=(both,))) == pytest.approx(0.5)
    assert copied_share(MACHINE) == 0.0
