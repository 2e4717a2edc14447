"""Eight users of a hybrid at once, for some turns: what each is told, and what is left behind."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hybrid_models import ids, publish

import hmt
from hmt.engine import LoadedModel
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt_bench.soak import Plan, run

pytestmark = pytest.mark.usefixtures("quick_processes")

USERS, TURNS, ROUNDS = 8, 2, 4
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 16, "host_memory": "96MiB"}
WAYS: dict[str, dict[str, Any]] = {
    # Four of the users have a priority, for three places: others give way to them.
    "alone": {"context": 800, "max_batch": 3},
    "disk": {"context": 800, "max_batch": 6, "host_memory": "192MiB"},
    "gpu": {
        "context": 1200, "max_batch": 6, "prefix_cache": True,
        "gpus": "fake", "gpu_memory": "64MiB",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    publish("qwen3_5_text-0", made, 1024, vocabulary=4096)
    return made


def talk(model: LoadedModel, user: int, turns: int) -> list[tuple[int, ...]]:
    """A user's answers; every second user has a priority, and all begin alike."""
    tokens, answers = [*ids(32, 99), *ids(12, user)], []
    for turn in range(turns):
        asked = hmt.Request(
            tokens, 14, ignore_eos=True, stop="no model writes this", priority=user % 2
        )
        answers.append(model.infer(asked).token_ids)
        tokens = [*tokens, *answers[-1], *ids(9, 100 + turn)]
    return answers


@pytest.mark.parametrize("way", WAYS)
def test_each_is_told_what_it_is_told_alone(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    with hmt.Engine(**OPTIONS, context=400, max_batch=1) as engine:
        model = engine.load_model(folder)
        alone = [talk(model, user, TURNS) for user in range(USERS)]
    kept = {"prefix_cache_dir": str(tmp_path / "kept")} if way == "disk" else {}
    with hmt.Engine(**OPTIONS | WAYS[way] | kept) as engine, ThreadPoolExecutor(USERS) as users:
        model = engine.load_model(folder)
        core, rests = model._core, list[int]()
        ledger = core.memory.used_bytes()
        for _ in range(ROUNDS):
            for _ in range(8):  # as after answers of one token: more begin than fit
                core.scheduler._forecast.note("", 1, whole=True)
            told = list(users.map(lambda user: talk(model, user, TURNS), range(USERS)))
            assert told == alone
            assert model._loop.call(lambda: at_rest(model))
            assert core.memory.used_bytes() == ledger
            gc.collect()
            rests.append(psutil.Process().memory_info().rss)
        assert rests[-1] - rests[1] < 8 << 20, rests
        load = core.scheduler.load
        assert way != "alone" or load.dropped or load.parked, load


def test_a_short_soak(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over HTTP, with users who leave and models that come and go, as mini-dense has it."""
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    text = "".join(chr(32 + number % 90) for number in ids(9000, 5))
    plan = Plan(3.0, 8, 2, 6, 1024, "96MiB", prefix_cache=True)
    content = run(plan, folder, text)
    verdict = content["verdict"]
    for name in ("rss_flat", "threads_flat", "passed"):  # as in the soak's own test
        verdict.pop(name)
    assert all(verdict.values()) and content["wrong"] == [], content
    assert content["answers_compared"] > 10
    assert {"asks", "streams", "cancels", "load", "unload"} <= set(content["outcomes"])


def at_rest(model: LoadedModel) -> bool:
    """Only prefixes have pages or slots, and they have no more than belongs to them."""
    memory = model._core.memory
    kv, states = memory.kv.allocator, memory.kv.states
    held = 0 if states.checkpoints is None else states.checkpoints.kept
    slots = states.slots
    return bool(
        not kv.sequences
        and kv.free_tokens == kv.capacity_tokens
        and slots.spare_free + held == slots.spare
        and slots._free.free - slots.spare_free == slots.count
    )
