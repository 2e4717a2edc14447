"""Small models and machines for tests of planning; no file, no weight."""

import random
from dataclasses import replace

from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSize
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.contracts.model import KVKind, KVLayer, ModelSpec
from hmt.planner import Demand
from hmt.planner.what_if.scenario import Scenario, ScenarioPlanner

UNIT = 1 << 18


def small_model(
    layers: int = 8,
    experts: int = 0,
    chosen: int = 0,
    dense_first: int = 0,
    sizes: tuple[int, int, int, int] = (20, 60, 8, 30),
) -> Demand:
    """Layers of attention and a network, or a router and experts; `sizes` in units of 256 KiB.

    sizes   of attention, of a network or router, of an expert, of a part of the head
    """
    attention, network, expert, head = (size * UNIT for size in sizes)

    def block(layer: int, kind: BlockKind, nbytes: int, index: int = 0) -> BlockSize:
        return BlockSize(BlockId(layer, kind, index), nbytes, nbytes, 2 * nbytes, "w4a8")

    blocks = [block(TRUNK, BlockKind.EMBEDDING, head)]
    for layer in range(layers):
        blocks.append(block(layer, BlockKind.ATTENTION, attention))
        if experts and layer >= dense_first:
            blocks.append(block(layer, BlockKind.ROUTER, network))
            blocks += [block(layer, BlockKind.EXPERT, expert, index) for index in range(experts)]
        else:
            blocks.append(block(layer, BlockKind.FFN, network))
    blocks += [block(TRUNK, BlockKind.HEAD, head, index) for index in range(2)]
    kv = tuple(KVLayer(KVKind.FULL, 2, 64, 64) for _ in range(layers))
    spec = ModelSpec("Small", layers, 64, 1000, 1 << 20, (), kv, 100, 16, experts_per_token=chosen)
    return Demand(spec, tuple(blocks), 0, 0, 512 * layers, 512, 1 << 16)


def random_model(chance: random.Random) -> Demand:
    """Any sizes."""
    experts = chance.choice([0, 0, 8, 64])
    return small_model(
        chance.randint(1, 12),
        experts,
        min(experts, chance.choice([1, 2, 4])),
        chance.randint(0, 2),
        (chance.randint(1, 200), chance.randint(1, 200), chance.randint(1, 50), 40),
    )


def machine_with(demand: Demand, ram: float = 1.5, device: float = 0.0) -> Machine:
    """One that has so many times the model's bytes in its memories; no GPU where 0."""
    cpu = ComputeRates(100e9, {"bf16@512": 1e12}, step_overhead_s=1e-4, layer_overhead_s=1e-5)
    machine = Machine("a machine", 8, int(demand.weight_bytes * ram) + (64 << 20), 5e9, cpu)
    if not device:
        return machine
    gpu = DeviceRates(
        "a GPU",
        int(demand.weight_bytes * device) + (16 << 20),
        link_rate=25e9,
        compute=ComputeRates(1e12, {"bf16@512": 1e14}, layer_overhead_s=1e-5),
        shared_link_rate=22e9,
        shared_cpu_rate=80e9,
        sync_overhead_s=2e-5,
    )
    return replace(machine, devices=(gpu,))


def with_cpu(machine: Machine, **rates: object) -> Machine:
    """The machine with other rates of its CPU."""
    return replace(machine, cpu=replace(machine.cpu, **rates))  # type: ignore[arg-type]


def with_gpu(machine: Machine, **rates: object) -> Machine:
    """The machine with other rates of its GPU, or of its link."""
    gpu = machine.devices[0]
    own = {name: value for name, value in rates.items() if hasattr(gpu, name)}
    compute = {name: value for name, value in rates.items() if name not in own}
    gpu = replace(gpu, **own, compute=replace(gpu.compute, **compute))  # type: ignore[arg-type]
    return replace(machine, devices=(gpu,))


def random_machine(chance: random.Random, demand: Demand) -> Machine:
    """Any rates, and memories from far too small to more than enough."""
    machine = machine_with(demand, chance.uniform(0.05, 1.6), chance.choice([0, 0.1, 0.4, 1.2]))

    def changed(rates: object, names: tuple[str, ...]) -> dict[str, float]:
        return {name: getattr(rates, name) * chance.uniform(0.2, 5) for name in names}

    machine = replace(machine, **changed(machine, ("disk_read_rate",)))  # type: ignore[arg-type]
    overheads = ("step_overhead_s", "layer_overhead_s")
    machine = with_cpu(machine, **changed(machine.cpu, ("read_rate", *overheads)))
    if machine.devices:
        gpu = machine.devices[0]
        links = ("link_rate", "shared_link_rate", "shared_cpu_rate", "sync_overhead_s")
        computing = changed(gpu.compute, ("read_rate", "layer_overhead_s"))
        machine = with_gpu(machine, **changed(gpu, links), **computing)
    return machine


def outlook(demand: Demand) -> ScenarioPlanner:
    """Of a model that has one encoding."""
    return ScenarioPlanner(lambda scheme, users: replace(demand, batch=users))


def setting(machine: Machine, **given: object) -> Scenario:
    """A prompt of 64 tokens at a context of 512, unless told otherwise."""
    values: dict[str, object] = {"context": 512, "prompt_tokens": 64}
    return Scenario(machine, **(values | given))  # type: ignore[arg-type]
