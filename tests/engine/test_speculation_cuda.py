"""Draft tokens on a GPU: captured steps that verify them give the tokens of steps without any."""

import random
from pathlib import Path
from typing import Any

import pytest
from draft_oracle import Oracle, always_guess
from reference import MINI_DENSE

import hmt
from hmt.engine import LoadedModel
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.memory.device import open_device
from hmt.profiling.random_model import Shape, write_random_model

GPUS = ["fake", pytest.param("0", marks=pytest.mark.gpu)]
DENSE = {"bf16": {}, "w4a16": {"quantization": "w4a16:32"}, "w4a8": {"quantization": "w4a8:32"}}
OPTIONS: dict[str, Any] = {"context": 2048, "host_memory": "320MiB", "max_batch": 4}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    write_random_model(folder, Shape(6, 512, 256, 8, 4, 64, experts=32, experts_per_token=4))
    return folder


def requests(count: int, length: int) -> list[hmt.Request]:
    """Greedy ones and drawn ones."""
    rng = random.Random(count)
    return [
        hmt.Request(
            [rng.randrange(16, 500) for _ in range(20 + 11 * n)],
            length,
            sampling=hmt.Sampling(temperature=float(n % 2), seed=n),
            ignore_eos=True,
        )
        for n in range(count)
    ]


def taken_bytes(gpu: str) -> int:
    if gpu == "fake":
        return 0
    device = open_device("cuda:0")
    device.empty_cache()  # as an engine does before it counts
    return device.used_bytes()


def captured(model: LoadedModel) -> GraphRunner:
    graphs = model._core.runner.executor.graphs
    assert isinstance(graphs, GraphRunner), model.summary().notes
    return graphs


def alike(model: LoadedModel, asked: list[hmt.Request], seed: int = 3) -> None:
    """One after the other, with drafts and without."""
    speculator = model._core.speculator
    own, speculator._proposer = speculator._proposer, None
    assert own is not None, "drafts are refused"
    wanted = [model.infer(one).token_ids for one in asked]
    model.reset_summary()
    known = [[*one.input, *answer] for one, answer in zip(asked, wanted, strict=True)]
    always_guess(model, Oracle(known, seed))
    assert [model.infer(one).token_ids for one in asked] == wanted
    account = model.summary().speculation
    assert account.accepted > 20 and account.proposed > account.accepted
    assert captured(model).works
    spread = [one for graphs in captured(model).graphs.values() for one in graphs.values()]
    assert any(one.sequences for one in spread), "steps with drafts are captured"
    speculator._proposer = own


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", DENSE)
def test_all_on_the_device(gpu: str, kind: str) -> None:
    memory = {"fake": "96MiB", "0": "2GiB"}[gpu]
    with hmt.Engine(**OPTIONS, **DENSE[kind], gpu_memory=memory, gpu_id=gpu) as engine:
        alike(engine.load_model(MINI_DENSE), requests(2 if gpu == "fake" else 4, 60))


@pytest.mark.gpu
def test_a_long_context() -> None:
    """Past where captures for 1024 positions end, and contexts are cut into more parts."""
    with hmt.Engine(**OPTIONS, gpu_memory="2GiB", gpu_id="0") as engine:
        model = engine.load_model(MINI_DENSE)
        ids = [16 + (7 * n) % 480 for n in range(1000)]
        alike(model, [hmt.Request(ids, 200, ignore_eos=True)])


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "w4a16:32"])
def test_experts_on_the_device(moe: Path, quantization: str) -> None:
    options = OPTIONS | {"quantization": quantization}
    with hmt.Engine(**options, gpu_memory="2GiB", gpu_id="0") as engine:
        alike(engine.load_model(moe), requests(3, 60))


@pytest.mark.parametrize("gpu", GPUS)
def test_networks_in_host_memory(gpu: str) -> None:
    memory = (12 << 20) + taken_bytes(gpu)
    options = OPTIONS | {"context": 512}
    with hmt.Engine(**options, gpu_memory=memory, gpu_id=gpu) as engine:
        model = engine.load_model(MINI_DENSE)
        assert captured(model).host_ffn
        alike(model, requests(2, 40))


@pytest.mark.gpu
def test_experts_that_the_cpu_is_asked_for(moe: Path) -> None:
    """Their sums depend in their last digits on what is cached: each token is a likeliest one."""
    options = OPTIONS | {"quantization": "w4a16:32", "dtype": "float32", "context": 512}
    [request] = requests(1, 60)
    with hmt.Engine(**options, gpu_memory=taken_bytes("0") + (44 << 20), gpu_id="0") as engine:
        model = engine.load_model(moe)
        assert model.plan.device.expert_slots
        known = [*request.input, *model.infer(request).token_ids]
        always_guess(model, Oracle([known], 3))
        answer = model.infer(request).token_ids
        assert captured(model).works and captured(model).served.experts > 0
        assert model.summary().speculation.accepted > 5
    with hmt.Engine(**options) as engine:
        model = engine.load_model(moe)
        first = len(request.input) - 1
        ids = [*request.input, *answer[:-1]]
        forced = model.logits(ids, range(first, len(ids)))
    gaps = [float(row.max() - row[token]) for row, token in zip(forced, answer, strict=True)]
    assert max(gaps) < 0.05


@pytest.mark.gpu
def test_pages_at_several_levels() -> None:
    """Parts are added as they are shared out: each token is a likeliest one."""
    options = OPTIONS | {"dtype": "float32", "kv_gpu_memory": "4MiB", "max_prefill_tokens": 64}
    ids = [16 + (7 * n) % 480 for n in range(600)]
    request = hmt.Request(ids, 60, ignore_eos=True)
    with hmt.Engine(**options, gpu_memory="2GiB", gpu_id="0") as engine:
        model = engine.load_model(MINI_DENSE)
        known = [*ids, *model.infer(request).token_ids]
        always_guess(model, Oracle([known], 3))
        answer = model.infer(request).token_ids
        assert captured(model).works
        assert any(one.sequences for one in captured(model).graphs[True].values())
        assert model.summary().speculation.accepted > 5
        model._core.speculator._proposer = None
    with hmt.Engine(**OPTIONS | {"dtype": "float32"}) as engine:
        model = engine.load_model(MINI_DENSE)
        forced = model.logits([*ids, *answer[:-1]], range(len(ids) - 1, len(ids) + 59))
    gaps = [float(row.max() - row[token]) for row, token in zip(forced, answer, strict=True)]
    assert max(gaps) < 0.05
