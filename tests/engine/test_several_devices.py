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
from hmt.engine.snapshot import ExpertTier
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.weights.store import device_store

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


def weight_bytes(kind: str) -> int:
    return sum(file.stat().st_size for file in MODELS[kind].glob("*.safetensors"))


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
    memory = [int(share * (weight_bytes(kind) + (6 << 20))) for share in shares]
    found, answer, plan = run(kind, executor=executor, host_memory=host, gpu_memory=memory, **TWO)
    assert torch.equal(found, logits) and answer == tokens
    assert [share.index for share in plan.devices] == [0, 1]
    for share, nbytes in zip(plan.devices, memory, strict=True):
        assert share.stages and sum(share.reserved.values()) <= nbytes
    assert max(plan.devices[0].stages) < min(plan.devices[1].stages), "rows of neighbours"


@pytest.mark.each_once
@pytest.mark.parametrize("room", ["resident", "copied"])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_are_captured_by_device(room: str, batch: int) -> None:
    prompts = ["Once upon a time", "The dog", "She said"][:batch]
    memory = "64MiB" if room == "resident" else "9MiB"
    answers = []
    for gpu in ({}, {"gpu_memory": memory, **TWO}):
        with hmt.Engine(context=512, host_memory="64MiB", max_batch=batch, **gpu) as engine:
            model = engine.load_model(MODELS["dense"])
            requests = [hmt.Request(input=text, max_new_tokens=20) for text in prompts]
            answers.append([one.token_ids for one in model.infer_batch(requests)])
            if gpu:
                plan, graphs = model.plan, model._core.runner.executor.graphs
                parts = [sum(map(len, part.graphs.values())) for part in graphs.parts]
                assert all(parts), "each row is captured"
                summary = model.summary()
                assert not summary.notes and summary.device.name == "a fake device + a fake device"
                copied = [bool(share.slot_counts) for share in plan.devices]
                assert copied == [room == "copied"] * 2
                there = [part.weights.counters for part in model._core.memory.on_devices]
                assert all(bool(one.copied_bytes) is (room == "copied") for one in there)
    assert answers[0] == answers[1]


def test_draft_tokens_are_verified_on_all_devices() -> None:
    text, answers = "The cat sat on the mat. " * 6, []
    for gpu in ({}, {"gpu_memory": "64MiB", **TWO}):
        with hmt.Engine(context=512, host_memory="64MiB", speculate="lookup", **gpu) as engine:
            model = engine.load_model(MODELS["dense"])
            answers.append(model.infer(hmt.Request(input=text, max_new_tokens=60)).token_ids)
            drafts = model.summary().speculation
    assert answers[0] == answers[1] and drafts is not None and drafts.accepted


def test_experts_are_cached_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts compute all of them there; single tokens some, as one device's tests say."""
    monkeypatch.setattr(device_store, "_MOST_EXPERTS_TOKENS", 24)
    options = {"context": 256, "host_memory": "64MiB", "quantization": "w4a16:32"}
    with hmt.Engine(**options) as engine:
        wanted = engine.load_model(MODELS["moe"]).logits(TOKENS, range(40), prefill=24)
    with hmt.Engine(gpu_memory=13 << 19, **TWO, **options) as engine:
        model = engine.load_model(MODELS["moe"])
        shares = model.plan.devices
        assert all(share.expert_slots and share.staging_slots for share in shares)
        found = model.logits(TOKENS, range(40), prefill=24)
        assert torch.equal(found[:24], wanted[:24])
        assert (found - wanted).norm() / wanted.norm() < 1e-5
        experts, spec = [b for b in model.plan.homes if b.kind is BlockKind.EXPERT], model.prepared
        layers = len({block.layer for block in experts})
        account = model.summary().device.experts
        assert account.needed == 16 * layers * spec.model.spec.experts_per_token
        seen = model.begin_snapshot().result().experts
        assert seen.counted.all() and len(seen.layers) == layers
        for row, layer in enumerate(seen.layers):
            slots = next(share.expert_slots for share in shares if layer in share.stages)
            assert 0 < (seen.places[row] == ExpertTier.DEVICE).sum() <= slots


def test_prompts_share_pages_on_all_devices(tmp_path: Path) -> None:
    """In memory, and over a disk with an engine that has one device."""
    text, answers = "Once upon a time there was a little dog. " * 4, []
    for gpu in (TWO, {"gpus": "fake"}, TWO):
        options = {"gpu_memory": "64MiB", "prefix_cache_dir": tmp_path, **gpu}
        with hmt.Engine(context=1024, host_memory="64MiB", **options) as engine:
            model = engine.load_model(MODELS["dense"])
            requests = [hmt.Request(input=text + end, max_new_tokens=8) for end in "aba"]
            answers.append([model.infer(request).token_ids for request in requests])
            counts = model.summary().prefixes
            assert counts["hits"] and bool(counts["drive_read_pages"]) is bool(answers[1:])
    assert answers[0] == answers[1] == answers[2]


def test_beams_share_pages_as_on_one_device() -> None:
    """Pages are copied on every device that has some of a sequence's."""
    answers = []
    for gpu in ({"gpus": "fake"}, TWO):
        options = {"gpu_memory": "64MiB", "max_batch": 4, **gpu}
        with hmt.Engine(context=1024, host_memory="64MiB", **options) as engine:
            model = engine.load_model(MODELS["dense"])
            text = "Once upon a time there was a little dog. " * 3
            request = hmt.Request(input=text, max_new_tokens=12)
            answers.append([one.token_ids for one in model.beam_search(request, 3)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "latency"}, "search for a plan chooses for one GPU"),
        ({"kv_gpu_memory": "1MiB"}, "leave one GPU alone"),
        ({"speculate": "mtp"}, "beside a model on one GPU"),
        ({"gpu_memory": "8MiB,8MiB,8MiB"}, "3 sizes, and 2 GPUs"),
        ({"gpus": "0,0"}, "each once"),
    ],
)
def test_what_several_devices_do_not_have_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hmt.Engine(**{"gpu_memory": "8MiB", **TWO, **options})


def test_budgets_are_one_for_each_device() -> None:
    with pytest.raises(BudgetError, match=r"GPU 2 of 2.*smallest attention takes"):
        run("dense", gpu_memory="16MiB,2MiB", **TWO)
    many = ",".join(["fake"] * 40)
    with pytest.raises(BudgetError, match="40 GPUs were asked for"):
        run("dense", gpu_memory="16MiB", gpus=many)
