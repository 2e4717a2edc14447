"""Layers spread over two fake devices: no cut, budget or copy changes a result."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hmt
from hmt.base.errors import BudgetError, ConfigError
from hmt.cli.options import embedded_model
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

MODELS = {"dense": embedded_model(), "moe": Path(__file__).parents[2] / "assets" / "mini-moe"}
TOKENS = list(range(20, 60))
TWO = {"gpus": "fake,fake"}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HMT_POISON", "on")
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))
    yield


def run(kind: str, **options: object) -> tuple[torch.Tensor, list[int], Plan]:
    with hmt.Engine(**{"context": 256, "host_memory": "64MiB", **options}) as engine:
        model = engine.load_model(MODELS[kind])
        logits = model.logits(TOKENS, range(40), prefill=24)
        request = hmt.Request(input="Once upon", max_new_tokens=8)
        tokens = list(model.infer(request).token_ids)
        plan = model.plan
    assert engine._ledger.reserved_bytes(Tier.DEVICE) == 0
    return logits, tokens, plan


@pytest.fixture(scope="module", params=list(MODELS))
def on_cpu(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, list[int]]:
    logits, tokens, _ = run(request.param)
    return request.param, logits, tokens


@pytest.mark.each_once
@pytest.mark.parametrize("executor", ["overlapped", "plain"])
@pytest.mark.parametrize("host", ["64MiB", "12MiB"])
@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.5, 0.5), (0.25, 0.6), (0.6, 0.25)])
def test_every_split_gives_the_same_logits(
    on_cpu: tuple[str, torch.Tensor, list[int]],
    shares: tuple[float, float],
    host: str,
    executor: str,
) -> None:
    kind, logits, tokens = on_cpu
    size = sum(file.stat().st_size for file in MODELS[kind].glob("*.safetensors"))
    memory = [int(share * (size + (6 << 20))) for share in shares]
    found, answer, plan = run(kind, executor=executor, host_memory=host, gpu_memory=memory, **TWO)
    assert torch.equal(found, logits) and answer == tokens
    assert [share.index for share in plan.devices] == [0, 1]
    for share, nbytes in zip(plan.devices, memory, strict=True):
        assert share.stages and sum(share.reserved.values()) <= nbytes
    assert max(plan.devices[0].stages) < min(plan.devices[1].stages), "rows of neighbours"
