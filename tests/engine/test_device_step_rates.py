"""Hundreds of random steps while the device's budget changes: no wrong value, and no growth."""

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import hmt
from hmt.cli.options import embedded_model
from hmt.contracts.plan import Tier
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

# What CI has time for, and a GPU: 10,000 in four parts, that run side by side.
STEPS = {"fake": 300, "0": 2_500}
TEXTS = {"fake": (1, 2), "0": (2, 8)}  # of the models that share the budget, before each has one
SEEDS = (11, 12, 13, 14)
MODELS = {"dense": embedded_model(), "moe": Path(__file__).parents[2] / "assets" / "mini-moe"}
# Prompts and single tokens are summed in different orders, with weights of 4 bits times floats.
# Sums of host and device are added last; a GPU's kernels add in another order altogether.
MOST = {"fake": {"dense": 1e-6, "moe": 1e-5}, "0": {"dense": 2e-3, "moe": 2e-3}}
OPTIONS = {"context": 128, "dtype": "float32", "quantization": "w4a16:32"}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HMT_POISON", "on")
    names = ["a fake device"]
    names += [torch.cuda.get_device_name(0)] if torch.cuda.is_available() else []
    for name in names:
        monkeypatch.setitem(machine._links, name, LinkRates(40e9))
    yield


@dataclass
class Tenant:
    """A model that has a part of the budget, and what its logits should be."""

    kind: str
    model: hmt.LoadedModel
    texts: list[list[int]]
    wanted: list[torch.Tensor]
    most: float
    steps: int = field(default=0)

    def step(self, chance: random.Random) -> None:
        """Some text, with so much of it as a prompt, token by token from there."""
        number = chance.randrange(len(self.texts))
        text = self.texts[number]
        prefill = chance.randrange(len(text))
        found = self.model.logits(text, range(len(text)), prefill=prefill)
        error = (found - self.wanted[number]).norm() / self.wanted[number].norm()
        assert error <= self.most, f"{self.kind} prefill {prefill}: {error}"
        self.steps += 1 + len(text) - prefill


@pytest.mark.parametrize(
    ("gpu", "seed"),
    [
        ("fake", SEEDS[0]),
        *(
            pytest.param("0", seed, marks=[pytest.mark.gpu, pytest.mark.timeout(400)])
            for seed in SEEDS
        ),
    ],
)
def test_random_steps_with_changing_budgets(gpu: str, seed: int) -> None:
    chance = random.Random(seed)
    texts = [[chance.randrange(16, 500) for _ in range(chance.randint(5, 48))] for _ in range(12)]
    wanted = {}
    for kind, path in MODELS.items():
        with hmt.Engine(host_memory="128MiB", **OPTIONS) as engine:  # type: ignore[arg-type]
            model = engine.load_model(path)
            wanted[kind] = [model.logits(text, range(len(text))) for text in texts]
    taken = 0
    if gpu == "0":
        from hmt.memory.device import open_device

        device = open_device("cuda:0")
        device.empty_cache()  # as an engine does before it counts
        taken = device.used_bytes()
    budget = {"gpu_memory": taken + (16 << 20), "gpus": gpu}
    steps, loads, sizes = 0, 0, set()
    with hmt.Engine(host_memory="256MiB", **budget, **OPTIONS) as engine:  # type: ignore[arg-type]
        while steps < STEPS[gpu]:
            tenants: list[Tenant] = []
            # The first takes what it wants, and the second what is left: by turns the larger part.
            for kind in chance.sample([*MODELS, *MODELS], chance.choice((1, 2, 2))):
                model = engine.load_model(MODELS[kind])
                tenants.append(Tenant(kind, model, texts, wanted[kind], MOST[gpu][kind]))
                sizes.add((kind, sum(model.plan.device.reserved.values())))
                loads += 1
            for _ in range(chance.randint(*TEXTS[gpu])):
                chance.choice(tenants).step(chance)
            chance.shuffle(tenants)
            for tenant in tenants:
                chance.choice(tenants).step(chance)
                steps += tenant.steps
            for tenant in tenants:
                tenant.model.close()
            tenants.clear()
            gc.collect()
            for tier in (Tier.DEVICE, Tier.HOST):
                assert engine._ledger.reserved_bytes(tier) == 0
    assert loads > 10 and len(sizes) > 3, "budgets did change"
