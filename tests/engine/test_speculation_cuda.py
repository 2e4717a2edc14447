"""Draft tokens on a GPU: captured steps that verify them give the tokens of steps without any.

So do draft models that compute there, and those that compute beside it.
"""

import random
from pathlib import Path
from typing import Any

import dflash_reference as dflash
import pytest
from draft_oracle import OpenGate, Oracle, always_guess
from eagle3_reference import agreeing_drafter, write
from reference import MINI_DENSE, MINI_MOE, transformers_model

import hmt
from hmt.contracts.plan import Tier
from hmt.engine import LoadedModel
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.speculation.block_proposer import BlockProposer
from hmt.engine.speculation.model_proposers import (
    DraftModelProposer,
    FirstOf,
    NextTokenProposer,
)
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
    with hmt.Engine(**OPTIONS, **DENSE[kind], gpu_memory=memory, gpus=gpu) as engine:
        alike(engine.load_model(MINI_DENSE), requests(2 if gpu == "fake" else 4, 60))


@pytest.mark.gpu
def test_a_long_context() -> None:
    """Past where captures for 1024 positions end, and contexts are cut into more parts."""
    with hmt.Engine(**OPTIONS, gpu_memory="2GiB", gpus="0") as engine:
        model = engine.load_model(MINI_DENSE)
        ids = [16 + (7 * n) % 480 for n in range(1000)]
        alike(model, [hmt.Request(ids, 200, ignore_eos=True)])


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "w4a16:32"])
def test_experts_on_the_device(moe: Path, quantization: str) -> None:
    options = OPTIONS | {"quantization": quantization}
    with hmt.Engine(**options, gpu_memory="2GiB", gpus="0") as engine:
        alike(engine.load_model(moe), requests(3, 60))


@pytest.mark.parametrize("gpu", GPUS)
def test_networks_in_host_memory(gpu: str) -> None:
    memory = (12 << 20) + taken_bytes(gpu)
    options = OPTIONS | {"context": 512}
    with hmt.Engine(**options, gpu_memory=memory, gpus=gpu) as engine:
        model = engine.load_model(MINI_DENSE)
        assert captured(model).host_ffn
        alike(model, requests(2, 40))


@pytest.mark.gpu
def test_experts_that_the_cpu_is_asked_for(moe: Path) -> None:
    """Their sums depend in their last digits on what is cached: each token is a likeliest one."""
    options = OPTIONS | {"quantization": "w4a16:32", "dtype": "float32", "context": 512}
    [request] = requests(1, 60)
    with hmt.Engine(**options, gpu_memory=taken_bytes("0") + (44 << 20), gpus="0") as engine:
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
    with hmt.Engine(**options, gpu_memory="2GiB", gpus="0") as engine:
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


# Models that draft

WAYS = {"draft": MINI_DENSE, "mtp": MINI_MOE, "eagle3": MINI_DENSE}


@pytest.fixture(scope="module")
def speculate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The option, by way."""
    made = agreeing_drafter(transformers_model("mini-dense").model.norm.weight, 4096)
    folder = write(made, tmp_path_factory.mktemp("eagle3"), "LlamaForCausalLM")
    return {"draft": f"draft={MINI_DENSE}", "mtp": "mtp", "eagle3": f"draft={folder}"}


def asked() -> list[hmt.Request]:
    """The last one says the same all the time."""
    return [*requests(2, 30), hmt.Request([33] * 30, 30, ignore_eos=True)]


def always_asked(model: LoadedModel) -> GraphRunner | None:
    """Let a model verify three tokens that its draft model drafts; that one's captures, if any."""
    speculator = model._core.speculator
    first = speculator._proposer
    assert isinstance(first, FirstOf), model.summary().notes
    kinds = DraftModelProposer | NextTokenProposer | BlockProposer
    [own] = (p for p in first._all if isinstance(p, kinds))
    speculator._proposer, speculator._gate, speculator._most = own, OpenGate(), 3
    graphs = own._model._runner.executor.graphs
    return graphs if isinstance(graphs, GraphRunner) else None


def drafted(model: LoadedModel, *, at_once: bool = True, least: int = 5) -> GraphRunner | None:
    """As `alike`, with what the model's own draft model drafts; its captures.

    least   draft tokens that are right
    """
    speculator = model._core.speculator
    own, speculator._proposer = speculator._proposer, None
    wanted = [model.infer(one).token_ids for one in asked()]
    speculator._proposer = own
    graphs = always_asked(model)
    if at_once:  # kernels of a GPU give a batch other bits than a sequence alone
        streams = [model.stream(one) for one in asked()]
        assert [stream.completion().token_ids for stream in streams] == wanted
    model.reset_summary()
    assert [model.infer(one).token_ids for one in asked()] == wanted
    account = model.summary().speculation
    assert account.accepted >= least and not account.failures
    assert captured(model).works
    shown = {key.shown is not None for one in captured(model).graphs.values() for key in one}
    assert True in shown or not speculator._proposer.needs_hidden
    return graphs


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model_on_the_device(gpu: str, way: str, speculate: dict[str, str]) -> None:
    memory = {"fake": "128MiB", "0": "2GiB"}[gpu]
    options = OPTIONS | {"gpu_memory": memory, "gpus": gpu, "speculate": speculate[way]}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(WAYS[way])
        draft = model._core.memory.draft
        assert draft is not None and draft.memory.on_device is not None, model.summary().notes
        graphs = drafted(model, at_once=gpu == "fake")
        assert graphs is not None and graphs.works
        keys = graphs.graphs[False]
        assert all(key.sequences == 1 for key in keys), "several tokens of one sequence"
        assert any(key.tokens > 1 for key in keys) and any(key.tokens == 1 for key in keys)
        assert {key.inputs > 0 for key in keys} == {way != "draft"}
        taken, ledger = model.summary().device, engine._ledger
        assert taken is not None and taken.used_bytes["draft"]
        reserved = ledger.reserved_bytes(Tier.DEVICE)
        assert sum(taken.used_bytes.values()) <= reserved <= ledger.budget_bytes(Tier.DEVICE)
        assert taken.budget_bytes == ledger.budget_bytes(Tier.DEVICE)
        right = model.summary().speculation.by_depth
        model.close()
        assert ledger.reserved_bytes(Tier.DEVICE) == ledger.reserved_bytes(Tier.HOST) == 0
    if gpu == "fake":  # drafts are those of the CPU, which test_drafters.py compares with others
        with hmt.Engine(**OPTIONS, speculate=speculate[way]) as engine:
            model = engine.load_model(WAYS[way])
            model._core.speculator._branches = False
            always_asked(model)
            for one in asked():
                model.infer(one)
            assert model.summary().speculation.by_depth == right


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("way", "mebibytes"), [("draft", 12), ("eagle3", 12), ("eagle3", 16)])
def test_a_draft_model_where_networks_are_in_host_memory(
    gpu: str, way: str, mebibytes: int, speculate: dict[str, str]
) -> None:
    """Of 12 MiB a draft model gets nothing: it computes on the CPU, and says so."""
    options = OPTIONS | {"gpu_memory": (mebibytes << 20) + taken_bytes(gpu), "gpus": gpu}
    with hmt.Engine(**options | {"context": 512, "speculate": speculate[way]}) as engine:
        model = engine.load_model(MINI_DENSE)
        assert captured(model).host_ffn
        notes = [note for note in model.summary().notes if "model computes on the CPU" in note]
        graphs = drafted(model, at_once=gpu == "fake")
        assert (graphs is None) == bool(notes) == (mebibytes == 12)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_drafter_of_blocks_on_the_device(gpu: str, tmp_path: Path) -> None:
    """Its steps are not captured; it drafts as on the CPU."""
    made = dflash.agreeing_drafter(transformers_model("mini-dense").model.norm.weight, 4096, 33)
    ways = {"speculate": f"draft={dflash.write(made, tmp_path, 'LlamaForCausalLM')}"}
    memory = {"fake": "128MiB", "0": "2GiB"}[gpu]
    with hmt.Engine(**OPTIONS, **ways, gpu_memory=memory, gpus=gpu) as engine:
        model = engine.load_model(MINI_DENSE)
        draft = model._core.memory.draft
        assert draft is not None and draft.memory.on_device is not None, model.summary().notes
        assert drafted(model, at_once=gpu == "fake", least=4) is None
        right = model.summary().speculation.by_depth
    if gpu == "fake":
        with hmt.Engine(**OPTIONS, **ways) as engine:
            model = engine.load_model(MINI_DENSE)
            model._core.speculator._branches = False
            always_asked(model)
            for one in asked():
                model.infer(one)
            assert model.summary().speculation.by_depth == right


def test_what_the_cpu_has_a_part_in() -> None:
    """It computes the output layer, and looks up the draft model's tokens."""
    options = OPTIONS | {"gpu_memory": "128MiB", "gpus": "fake", "speculate": "mtp"}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MINI_MOE)
        core: Any = model._core
        there = core.memory.on_device
        core.runner.executor.graphs = GraphRunner(
            model.prepared.model, there.weights, core.memory.kv, there.device, head=False
        )
        drafts = core.speculator._proposer._all[1]._model._runner.executor.graphs
        drafts._looks_up = False
        drafted(model)
        kept = [one for one in drafts.graphs[False].values() if one.recorded]
        assert kept and all(one.hidden is not None for one in kept)
