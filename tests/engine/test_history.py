"""Runs are kept with what was predicted of them, and predictions learn from them."""

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from math import inf, nan
from pathlib import Path

import pytest
from hmt.engine.foreseen import Decoded

import hmt
from hmt.engine import history, machine
from hmt.engine.machine import machine_for

MODEL = Path(str(files("hmt") / "embedded" / "mini-dense"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    machine_for(MODEL)  # measured once for all tests
    shutil.copy(machine.cache_file(), tmp_path)
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    yield tmp_path


def test_a_run_is_kept_and_the_next_one_is_predicted_as_it_was(cache: Path) -> None:
    with hmt.Engine(host_memory="64MiB", context=512, max_batch=2) as engine:
        model = engine.load_model(MODEL)
        model.infer(hmt.Request(input="A", max_new_tokens=4, ignore_eos=True))
        assert model.summary().foreseen.actual_s > 0
        model.reset_summary()
        requests = [hmt.Request(input="Once", max_new_tokens=40, ignore_eos=True)] * 2
        model.infer_batch(requests)
        found = model.summary().foreseen
        model.close()
        model.close()
    assert found.users == 2 and 20 < found.context < 46 and found.tokens_per_s > 0
    (line,) = (cache / "runs.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["model"], record["users"], record["steps"]) == ("mini-dense", 2, 39)
    assert record["actual_s"] == pytest.approx(found.actual_s)

    (run,), before, after = history.recalibrate()
    assert before == {} and machine.factors() == after
    assert abs(run.error(after)) < abs(run.error({})) or abs(run.error({})) < 0.02
    rate = machine.remembered(MODEL).ram_read_rate
    assert machine_for(MODEL).ram_read_rate == pytest.approx(rate / after["CPU"])
    # Parts are kept as they would be without factors, so calibrating again finds the same.
    history.keep(found, Decoded(steps=history._LEAST_STEPS), "again")
    assert len(history.runs()) == 2
    # What another probe finds, these runs say nothing of.
    content = json.loads((cache / "machine.json").read_text())
    content["machines"][machine.fingerprint()]["ram_read_rate"] = 1e9
    (cache / "machine.json").write_text(json.dumps(content))
    assert history.runs() == []


def test_the_file_is_bounded_and_damage_is_passed_over(cache: Path) -> None:
    with hmt.Engine(host_memory="64MiB", context=256) as engine:
        model = engine.load_model(MODEL)
        model.infer(hmt.Request(input="Once", max_new_tokens=20, ignore_eos=True))
        found, decoded = model.summary().foreseen, Decoded(steps=history._LEAST_STEPS)
    assert found is not None
    file = cache / "runs.jsonl"
    file.write_text("no json\n[]\n" * history._KEPT)
    assert history.runs() == []
    history.keep(found, decoded, "a run")
    good = json.loads(file.read_text().splitlines()[-1])
    for name in ("at_once", "actual_s"):
        for wrong in (nan, inf, 10**400, "1", None):
            file.write_text(json.dumps(good | {name: wrong}))
            assert history.runs() == [], (name, wrong)
    file.write_text("no json\n[]\n" * history._KEPT)
    history.keep(found, Decoded(steps=history._LEAST_STEPS - 1), "short")
    assert history.runs() == []
    for _ in range(3):
        history.keep(found, decoded, "a run")
    assert len(history.runs()) == 3 and len(file.read_text().splitlines()) == history._KEPT
    (cache / "machine.json").write_text("damaged")
    assert machine.factors() == {} and history.runs() == []
