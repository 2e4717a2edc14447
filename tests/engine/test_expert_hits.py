"""What runs see of their caches of experts is kept, fades, and survives any file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hmt.engine.expert_hits import keep_sighting, routing_of, seen_hits, with_point
from hmt.engine.foreseen import Decoded, Foreseer
from hmt.planner.observed import SeenPoint, Sighting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import MINI_MOE

import hmt
from hmt.engine import EngineConfig, core, expert_hits, prepare
from hmt.engine.machine import cache_file, machine_for
from hmt.engine.outlooks import outlook_on
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of
from hmt.planner.machine_file import read_machine
from hmt.planner.outlook import Setting
from hmt.planner.routing import UNIFORM

CONFIG = {"model_type": "m", "experts": 8, "dtype": "bfloat16"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    return tmp_path / "experts.json"


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_for(MINI_MOE)  # once for all tests
    shutil.copy(cache_file(), tmp_path)
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))


point = st.tuples(st.floats(0.001, 0.999), st.floats(0, 1), st.floats(64, 1e6))


@given(st.lists(point, max_size=25))
def test_points_are_the_faded_mean_of_all_runs(seen: list[tuple[float, float, float]]) -> None:
    kept: list[SeenPoint] = []
    for each in seen:
        kept = with_point(kept, SeenPoint(*each))
    # Plainly: each run counts 0.7 for every run since.  Forgotten ones were a hundredth of all.
    total = [0.0] * 32
    hits = [0.0] * 32
    for age, (share, rate, weight) in enumerate(reversed(seen)):
        counts = min(weight, 1e5) * 0.7**age
        total[int(share * 32)] += counts
        hits[int(share * 32)] += counts * rate
    for each in kept:
        bucket = int(each.share * 32)
        assert each.weight == pytest.approx(total[bucket], abs=0.05 * sum(total))
        assert each.hits * each.weight == pytest.approx(hits[bucket], abs=0.05 * sum(total))
    missing = set(range(32)) - {int(each.share * 32) for each in kept}
    assert all(total[bucket] <= 0.05 * sum(total) for bucket in missing)


def test_what_runs_saw_is_used_for_models_that_route_alike(cache: Path) -> None:
    assert seen_hits(CONFIG, 8, 2) is None
    keep_sighting(CONFIG, Sighting(8, 2, 0.5, 1.0, 1000, 100))
    packed = CONFIG | {"dtype": "float32", "quantization_config": {"bits": 4}}
    found = seen_hits(packed, 8, 2)
    assert found is not None and found.hits(0.5) == pytest.approx(0.9, abs=1e-6)
    assert found.origin == "1 run of this model"
    assert seen_hits(CONFIG | {"experts": 9}, 8, 2) is None, "another model"
    assert seen_hits(CONFIG, 16, 2) is None and seen_hits(CONFIG, 8, 1) is None
    before = cache.read_text()
    for nothing in (None, Sighting(8, 2, 1.0, 1, 1000, 0), Sighting(8, 2, 0.5, 1, 10, 1)):
        keep_sighting(CONFIG, nothing)
    assert cache.read_text() == before
    for _ in range(12):  # a run that was different is soon forgotten
        keep_sighting(CONFIG, Sighting(8, 2, 0.5, 1.0, 1000, 300))
    found = seen_hits(CONFIG, 8, 2)
    assert found is not None and found.hits(0.5) == pytest.approx(0.7, abs=0.01)
    for number in range(70):
        keep_sighting({"model": number}, Sighting(8, 2, 0.5, 1.0, 1000, 100))
    assert len(json.loads(cache.read_text())["models"]) == 64
    assert seen_hits(CONFIG, 8, 2) is None and seen_hits({"model": 69}, 8, 2) is not None
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


LEAF = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
ANY = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
POINT = st.fixed_dictionaries({}, optional={"share": ANY, "hits": ANY, "weight": ANY}) | ANY
ENTRY = ANY | st.fixed_dictionaries(
    {"experts": st.just(8), "chosen": st.just(2)},
    optional={"runs": ANY, "points": st.lists(POINT, max_size=3) | ANY},
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(ENTRY, st.sampled_from([1, 1, 1, 2, "1", None]), st.integers(0, 40))
def test_no_file_is_a_reason_to_fail(cache: Path, entry: object, version: object, cut: int) -> None:
    content = json.dumps({"version": version, "models": {routing_of(CONFIG): entry}})
    cache.write_text(content[: len(content) - cut])
    seen_hits(CONFIG, 8, 2)
    keep_sighting(CONFIG, Sighting(8, 2, 0.5, 1.0, 100000, 10000))
    found = seen_hits(CONFIG, 8, 2)
    assert found is not None and 0 < found.hits(0.5) < 1
    for damage in (b"\xff\xfe", b"[" * 100000, b""):
        cache.write_bytes(damage)
        assert seen_hits(CONFIG, 8, 2) is None


def test_a_run_tells_the_next_prediction(measured: None) -> None:
    users, given = 3, {"host_memory": "11MiB", "context": 384, "max_batch": 3, "guesses": False}
    config = EngineConfig.resolve(**given)
    assert prepare(MINI_MOE, config).demand.hits is None
    with hmt.Engine(**given) as engine:
        model = engine.load_model(MINI_MOE)
        texts = ("Once upon a time", "def main():", "| a | b |")
        requests = [hmt.Request(input=t, max_new_tokens=24, ignore_eos=True) for t in texts]
        model.infer_batch(requests)
        decoded, before = model._core.decoded, model.summary().foreseen
        model.close()
    assert 0 < decoded.expert_reads < decoded.experts
    prepared = prepare(MINI_MOE, config)
    assert prepared.demand.hits.origin == "1 run of this model"
    costs = CostModel(loads_of(prepared.demand, prepared.plan), prepared.machine)
    found = costs.decode(users, before.context).nbytes["disk"] / users
    actual = decoded.disk_bytes / decoded.tokens
    assert found == pytest.approx(actual, rel=0.1), "as it was, before it runs again"
    assert before.disk_bytes == pytest.approx(actual, rel=0.4), "of a model that never ran"
    # A trace comes before what runs had.
    for hits in (UNIFORM, None):
        outlook = outlook_on(str(MINI_MOE), config, hits)
        demand = outlook.demand(Setting(prepared.machine, users=users))
        assert demand.hit_curve == (hits or prepared.demand.hits)


def test_what_a_gpus_cache_did_is_told_alone() -> None:
    config = EngineConfig.resolve(quantization="w4a8", context=1024)
    outlook = outlook_on("qwen3-30b-a3b", config)
    machine = read_machine("16gb-card-gen5")
    decoded = Decoded(steps=10, tokens=20, experts=500, expert_reads=100)
    for device_bytes, shared, expected in (
        (8 << 30, (4000, 1000), 1000 / 4000),
        (8 << 30, (0, 0), None),  # no step that asked it
        (0, None, 100 / 500),
    ):
        setting = Setting(machine, "w4a8", 2, 512, device_bytes=device_bytes, host_bytes=12 << 30)
        planned = outlook.plan(setting)
        found = Foreseer(planned.demand, planned.plan, machine).sighting(decoded, shared)
        if expected is None:
            assert found is None
            continue
        assert found is not None and found.missed / found.needed == expected
        slots = planned.plan.device.expert_slots
        if device_bytes:
            assert found.residency == slots / 128
        assert 0 < found.residency < 1 and (found.experts, found.chosen, found.texts) == (128, 8, 2)
    room = Setting(machine, "w4a8", 2, 512, device_bytes=0, host_bytes=60 << 30)
    planned = outlook.plan(room)
    assert Foreseer(planned.demand, planned.plan, machine).sighting(decoded) is None, "all is there"


def test_a_long_run_is_kept_piece_by_piece(
    measured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_STEPS_KEPT", 10)
    pieces: list[Sighting | None] = []
    keep = expert_hits.keep_sighting
    monkeypatch.setattr(
        expert_hits, "keep_sighting", lambda config, seen: pieces.append(seen) or keep(config, seen)
    )
    with hmt.Engine(host_memory="10MiB", context=256, guesses=False) as engine:
        model = engine.load_model(MINI_MOE)
        request = hmt.Request(input="Once", max_new_tokens=26, ignore_eos=True)
        model.infer(request)
        assert len(pieces) == 2 and (tmp_path / "experts.json").exists(), "while it runs"
        model.reset_summary()  # what has not been kept yet is forgotten
        model.infer(replace(request, max_new_tokens=6))
        model.close()
    needed = [piece.needed for piece in pieces if piece is not None]
    assert needed == [160, 160, 80], "ten steps, ten, and five of four experts in four layers"
