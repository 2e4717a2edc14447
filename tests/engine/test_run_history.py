"""Runs are kept with what was predicted of them, and predictions learn from them."""

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from math import inf, nan
from pathlib import Path

import pytest

import hmt
from hmt.engine import run_history
from hmt.hardware import machine
from hmt.hardware.machine import machine_for

MODEL = Path(str(files("hmt") / "embedded" / "mini-dense"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    machine_for(MODEL)  # measured once for all tests
    shutil.copy(machine.cache_file(), tmp_path)
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    yield tmp_path


def keep(cache: Path, ratios: list[float], **changes: object) -> None:
    """Write runs whose steps took so many times what was predicted."""
    record = {"machine": machine.fingerprint(), "probed": machine.probed(), "model": "a model"}
    record |= {"plan": "host", **changes}  # type: ignore[dict-item]
    lines = [json.dumps(record | {"decode": [0.01, 0.01 * ratio]}) for ratio in ratios]
    (cache / "runs.jsonl").write_text("\n".join(lines) + "\n")


def test_the_next_run_is_predicted_as_the_last_one_was_measured(cache: Path) -> None:
    predicted = []
    for _ in range(2):
        with hmt.Engine(host_memory="64MiB", context=512, max_batch=2) as engine:
            model = engine.load_model(MODEL)
            requests = [hmt.Request(input="Once", max_new_tokens=40, ignore_eos=True)] * 2
            model.infer_batch(requests)
            summary = model.summary().predicted
            assert summary is not None and summary.actual_s > 0
            assert summary.users == 2 and 20 < summary.context < 46 and summary.tokens_per_s > 0
            predicted.append(summary)
            model.close()
            model.close()
        lines = (cache / "runs.jsonl").read_text().splitlines()
        assert len(lines) == len(predicted), "closing twice keeps a run once"
    record = json.loads(lines[0])
    assert (record["model"], record["plan"]) == ("mini-dense", "host")
    assert record["decode"] == pytest.approx([predicted[0].step_s, predicted[0].actual_s])
    # The second prediction is the first one times what the first run has shown.
    assert predicted[1].step_s == pytest.approx(predicted[0].actual_s, rel=0.15)


def test_later_runs_count_more_and_other_models_and_plans_nothing(cache: Path) -> None:
    keep(cache, [2.0])
    assert run_history.factors_of("a model")["host"].decode == pytest.approx(2)
    assert run_history.factors_of("a model")["host"].prefill == 1
    assert run_history.factors_of("another") == {} == run_history.factors_of("")
    keep(cache, [1.0, 1.0, 4.0])
    assert run_history.factors_of("a model")["host"].decode == pytest.approx(2), (
        "half of it in logs"
    )
    keep(cache, [1000.0])
    assert run_history.factors_of("a model")["host"].decode == pytest.approx(run_history._MOST)
    keep(cache, [3.0], plan="host+disk")
    assert set(run_history.factors_of("a model")) == {"host+disk"}
    # What another probe finds, these runs say nothing of.
    keep(cache, [3.0], probed="another")
    assert run_history.factors_of("a model") == {}


def test_the_file_is_bounded_and_damage_is_passed_over(cache: Path) -> None:
    file = cache / "runs.jsonl"
    file.write_text("no json\n[]\n" * run_history._KEPT)
    assert run_history.factors_of("a model") == {}
    for wrong in (nan, inf, 10**400, "1", None, 0.0, -1.0):
        keep(cache, [], decode=[0.01, wrong])
        record = {"machine": machine.fingerprint(), "probed": machine.probed(), "plan": "host"}
        file.write_text(json.dumps(record | {"model": "a model", "decode": [0.01, wrong]}))
        assert run_history.factors_of("a model") == {}, wrong
    file.write_text("no json\n[]\n" * run_history._KEPT)
    for _ in range(2):
        with hmt.Engine(host_memory="64MiB", context=256, speculate="off") as engine:
            model = engine.load_model(MODEL)
            model.infer(hmt.Request(input="Once", max_new_tokens=run_history._LEAST_STEPS + 2))
    assert len(file.read_text().splitlines()) == run_history._KEPT
    (cache / "machine.json").write_text("damaged")
    assert run_history.factors_of("mini-dense") == {}
