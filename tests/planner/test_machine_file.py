"""Machines in TOML and profiles in YAML: what is shipped can be read, what is wrong is said."""

import tomllib
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from models import machine_with, outlook, setting, small_model

from hmt.base.errors import ConfigError, MissingFileError
from hmt.contracts.encoding import Activations, Encoding, Packing
from hmt.hardware.machine_file import KERNELS, machine_names, machine_of, machine_toml, read_machine
from hmt.planner.cost.expert_hit_rate import PUBLISHED, UNIFORM
from hmt.planner.placement.device import DeviceChoice, DeviceRoom
from hmt.planner.placement.numa import on_numa_nodes
from hmt.planner.what_if.profiles import (
    likely_experts,
    plan_profile,
    profile_names,
    profile_of,
    read_profile,
)
from hmt.quant import Format

LEAST = {
    "name": 'a "new" one\n', "cores": 4, "ram_bytes": "8GiB", "cpu": {"read_rate": "40GB/s"},
    "disk_read_rate": 2e9,
}  # fmt: skip


@pytest.mark.parametrize("name", machine_names())
def test_shipped_machines_are_read_and_written_alike(name: str, tmp_path: Path) -> None:
    machine = read_machine(name)
    file = tmp_path / "machine.toml"
    file.write_text(machine_toml(machine))
    assert read_machine(str(file)) == machine
    assert machine.note and machine.cpu.read_rate and machine.cpu.gemm


def test_sizes_and_rates_are_read_as_people_write_them() -> None:
    gpu = {"name": "a GPU", "memory_bytes": "8GiB", "link_rate": "25GB/s"}
    compute = {"read_rate": 1e12, "gemm": {"bf16@512": 1e14}, "layer_overhead_s": 1e-5}
    cpu = {"read_rate": "40GB/s", "gemm": {"w4a8@1": "30GB/s", "w4a8@512": 1e12}}
    machine = machine_of(LEAST | {"cpu": cpu, "devices": [gpu | {"compute": compute}, gpu]}, "here")
    assert (machine.ram_bytes, machine.cpu.read_rate) == (8 << 30, 40e9)
    assert machine.cpu.gemm == {"w4a8@1": 30e9, "w4a8@512": 1e12}
    first, second = machine.devices
    assert machine.device is first and machine.device_bytes == 8 << 30
    assert first.compute.gemm == {"bf16@512": 1e14} and second.compute.read_rate == 0
    assert machine_of(tomllib.loads(machine_toml(machine)), "again") == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ram_byte": 1}, "did you mean ram_bytes"),
        ({"ram_read_rate": 1}, r"it is now read_rate in \[cpu\]"),
        ({"device_name": "a GPU"}, r"it is now name in \[\[devices\]\]"),
        ({"cpu": {"read_rates": 1}}, "did you mean cpu.read_rate"),
        ({"cores": 0}, "whole number"),
        ({"cores": True}, "number"),
        ({"cpu": {"read_rate": "fast"}}, "cpu.read_rate = 'fast': .*55GB/s"),
        ({"cpu": 3}, "cpu must be a table"),
        ({"disk_read_rate": -1}, "at least 0"),
        ({"ram_bytes": []}, "cannot read"),
        ({"cpu": {"gemm": 3}}, "table"),
        ({"name": 3}, "text"),
        ({"remote_share": 1.5}, "share"),
        ({"devices": {"name": "a GPU"}}, r"as \[\[devices\]\]"),
        ({"devices": [{"name": "a GPU"}]}, "devices.memory_bytes is missing"),
        ({"devices": [{"name": "", "memory_bytes": "8GiB", "link_rate": 1}]}, "a GPU needs name"),
        ({"ram_bytes": 0}, "more than 0"),
        ({"disk_read_rate": float("nan")}, "at least 0"),
        ({"disk_read_rate": 10**400}, "at least 0"),
        ({"ram_bytes": 10**400}, "any machine"),
        ({"ram_bytes": "9" * 400 + "GiB"}, "any machine"),
        ({"cpu": {"gemm": {"int4@1": 1e9}}}, "'int4@1' is unknown; write ENCODING@TOKENS"),
        ({"cpu": {"gemm": {"w4a8": 1e9}}}, "ENCODING@TOKENS"),
        ({"cpu": {"gemm": {"w4a8@x": 1e9}}}, "ENCODING@TOKENS"),
        ({"cpu": {"gemm": {"w4a8@0": 1e9}}}, "ENCODING@TOKENS"),
    ],
)
def test_a_wrong_description_is_refused_by_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine_of(LEAST | change, "here")


def test_what_is_not_there_is_listed(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="rtx-4090-desktop"):
        read_machine("no-such-machine")
    with pytest.raises(MissingFileError, match="balanced, latency, throughput"):
        read_profile("no-such-profile")
    with pytest.raises(ConfigError, match="cores is missing"):
        machine_of({key: value for key, value in LEAST.items() if key != "cores"}, "here")
    file = tmp_path / "broken"
    file.write_text("= [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_machine(str(file))
    for text in ("a: [", "a: 2026-13-01", "[" * 5000, b"\xff\xfe"):
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError, match="not valid YAML"):
            read_profile(str(file))
    for text in ("a = " + "[" * 5000, "a = " + "9" * 5000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="not valid TOML"):
            read_machine(str(file))
    file.write_text(machine_toml(machine_of(LEAST, "here")), encoding="utf-8-sig")
    assert read_machine(str(file)).cores == 4


def test_rates_are_known_by_the_names_of_kernels() -> None:
    known = {Format(encoding, activations=each).kernel for encoding in Encoding
             for each in (Activations.FLOAT, Activations.INT8_TOKEN)
             if encoding.packing is not Packing.BLOCKS}  # fmt: skip
    assert known == set(KERNELS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goal: speed", "one of latency"),
        ("memory: {gpu_layer: 2}", "gpu_layer is unknown"),
        ("memory: 2", "memory is 2; it must have gpu_layers"),
        ("memory: {gpu_layers: 0}", "at least 1"),
        ("memory: {expert_threshold: 2}", "0 to 1"),
        ("compute: {batch_size: 1.5}", "whole number"),
        ("compute: {cuda_graph: false}", "HMT always does that"),
        ("compute: {parallel: 1}", "true or false"),
        ("gpu: {}", "gpu is unknown"),
        ("[]", "must be a mapping"),
    ],
)
def test_a_wrong_profile_is_refused_by_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_of(yaml.safe_load(text), "here")


def test_a_profile_decides_what_it_names() -> None:
    assert profile_of({"memory": None, "compute": {"batch_size": 3}}, "here").batch_size == 3
    demand = small_model(8, experts=32, chosen=4)
    setting_here = setting(machine_with(demand, device=0.4))
    plans = {
        name: plan_profile(outlook(demand), setting_here, read_profile(name)).plan
        for name in profile_names()
    }
    layers = {name: sum(s < 8 for s in plan.device.stages) for name, plan in plans.items()}
    assert layers["latency"] == 2 and layers["throughput"] == 4
    assert plans["throughput"].device.expert_slots >= plans["latency"].device.expert_slots
    alone = plan_profile(
        outlook(demand), setting(machine_with(demand)), read_profile("latency")
    ).plan
    assert not alone.device.stages, "without a GPU the rest of the profile is planned"


def test_experts_of_a_profile_leave_host_memory_its_page_tables() -> None:
    demand = small_model(8, experts=64, chosen=4, sizes=(10, 10, 60, 10))
    profile = profile_of({"memory": {"gpu_layers": 8, "expert_threshold": 0.03}}, "here")
    machine = machine_with(demand, ram=1.2, device=2)
    wanted = DeviceChoice(8, staying=8, expert_slots=16, staging_slots=8)

    def room(nbytes: int) -> DeviceRoom:
        host = demand.weight_bytes
        return DeviceRoom(demand, nbytes, chunk=64, context=512, host_bytes=host)

    step = 1 << 16
    least = step * bisect_left(
        range(machine.device_bytes // step), 1, key=lambda n: room(n * step).taken(wanted) or 0
    )
    # So many fit, but then there is room to map half of host memory.
    asked = setting(machine, device_bytes=least + room(least).mapping // 2, max_prefill_tokens=64)
    first = outlook(demand).plan(replace(asked, device=wanted)).plan
    assert first.disk_bytes_per_token
    plan = plan_profile(outlook(demand), asked, profile).plan
    assert not plan.disk_bytes_per_token and 0 < plan.device.expert_slots < 16


def test_a_threshold_is_a_probability_of_an_expert() -> None:
    assert likely_experts(100, 8, 0.08, UNIFORM) == 100
    assert likely_experts(100, 8, 0.081, UNIFORM) == 0
    kept = [likely_experts(256, 8, share, PUBLISHED) for share in (0.2, 0.1, 0.05, 0.0)]
    assert kept == [0, 16, 64, 256]


def test_one_node_of_several_has_its_share() -> None:
    machine = read_machine("dgx-h100")
    assert machine.numa_nodes == 2
    assert (
        on_numa_nodes(machine, None, 1 << 30) == machine == on_numa_nodes(machine, (0, 1), 1 << 30)
    )
    one = on_numa_nodes(machine, (1, 1), 1 << 30)
    assert (one.cores, one.ram_bytes) == (machine.cores // 2, machine.ram_bytes // 2)
    assert one.cpu.read_rate == machine.cpu.read_rate / 2
    assert one.devices[0].link_rate == machine.devices[0].link_rate
    assert on_numa_nodes(machine, "auto", 1 << 30) == one
    assert on_numa_nodes(machine, "auto", machine.ram_bytes) == machine, "it does not fit one"
    assert on_numa_nodes(one, "auto", 1 << 30) == one
    # Four nodes, two of them on each socket: those of the GPU's are bound together.
    rows = ((10, 12, 21, 21), (12, 10, 21, 21), (21, 21, 10, 12), (21, 21, 12, 10))
    four = replace(machine, numa_nodes=4, numa_distances=rows)
    socket = on_numa_nodes(four, "auto", 1 << 30)
    assert socket.numa_nodes == 2 and socket.numa_distances == ((10, 12), (12, 10))
    assert socket.cpu.read_rate == machine.cpu.read_rate / 2 and socket.cores == machine.cores // 2
    assert on_numa_nodes(four, (1, 1), 1 << 30).cores == machine.cores // 4
    assert on_numa_nodes(four, "auto", machine.ram_bytes * 6 // 10) == four
    assert on_numa_nodes(socket, "auto", 1 << 30) == socket
    assert machine_of(tomllib.loads(machine_toml(four)), "here") == four
    for wrong in ([[10]], [[10, 21], [21]], [[10, 21], [21, 1.5]], "far"):
        content = tomllib.loads(machine_toml(machine)) | {"numa_distances": wrong}
        with pytest.raises(ConfigError, match="numa_distances"):
            machine_of(content, "here")
