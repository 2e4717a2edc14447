"""Runs are predicted and measured in the same terms; tables and pictures show both."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hmt.base.errors import HMTError
from hmt.bench.predictions import (
    Case,
    cases,
    compare,
    content_of,
    cpu_cases,
    error,
    gpu_cases,
    middle,
    process,
    runs_of,
    scatter_svg,
    summed_up,
    table,
)
from hmt.bench.random_model import Shape
from hmt.contracts.machine import Machine
from hmt.engine.machine import machine_for

TINY = Shape(2, 64, 128, 4, 2, experts=4, experts_per_token=2)


def test_a_run_is_measured_in_the_terms_of_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases.WRITTEN, "moe", TINY)
    case = Case("moe", None, 0.3, 40, 2, 24)
    found = process.run(case, tmp_path)
    predicted, measured = found["predicted"], found["measured"]
    assert measured["tokens_per_s"] > 0 and measured["ttft_s"] > 0
    assert predicted["host_bytes"] == pytest.approx(measured["host_bytes"], rel=0.3)
    assert predicted["peak_bytes"] > 0 and predicted["disk_bytes"] > 0
    kept = process.run(replace(case, model="mini-dense", kept=1, users=1, chunk=16), tmp_path)
    assert kept["predicted"]["chunk"] == 16
    assert kept["predicted"]["disk_bytes"] == kept["measured"]["disk_bytes"] == 0
    assert error(kept, "disk_bytes") is None and error(kept, "host_bytes") == pytest.approx(0)

    content = content_of([found, kept], machine_for(tmp_path))
    assert content["errors"] == content["errors_of_runs"] and not content["apart"]
    assert content["errors"]["host_bytes"]["runs"] == 2
    assert json.loads(json.dumps(content)) == content
    assert case.name in table(content) and "median" in table(content)
    picture = scatter_svg([content])
    assert picture.count("<circle") == sum(
        error(run, name) is not None for run in (found, kept) for name in ("tokens_per_s", "ttft_s")
    )


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(HMTError, match="no-such-folder"):
        list(runs_of([Case(str(tmp_path / "no-such-folder"), None, 1, 16, 1)], tmp_path))


def test_errors_are_summed_up() -> None:
    def run(predicted: float, measured: float) -> dict[str, Any]:
        same = dict.fromkeys(("ttft_s", "host_bytes", "disk_bytes", "link_bytes"), 0.0)
        return {
            "case": {"users": 1},
            "predicted": same | {"tokens_per_s": predicted, "peak_bytes": 100},
            "measured": same | {"tokens_per_s": measured, "peak_bytes": 80},
        }

    found = summed_up([run(11, 10), run(8, 10), run(10, 10)])
    assert set(found) == {"tokens_per_s", "peak_bytes"}
    assert found["tokens_per_s"] == pytest.approx(
        {"runs": 3, "median": 0.1, "worst": 0.2, "lowest": -0.2}
    )


def test_a_case_is_off_by_the_middle_of_its_runs() -> None:
    def run(name: str, tokens_per_s: float, ttft_s: float, peak: float) -> dict[str, Any]:
        """Predicted are 10 tokens/s, a second, and 100 bytes."""
        none = dict.fromkeys(("host_bytes", "disk_bytes", "link_bytes"), 0.0)
        first = {"tokens_per_s": 10.0, "ttft_s": 1.0, "peak_bytes": 100.0}
        seen = {"tokens_per_s": tokens_per_s, "ttft_s": ttft_s, "peak_bytes": peak}
        return {
            "case": {"name": name, "users": 1},
            "predicted": none | first,
            "measured": none | seen,
        }

    rounds = [
        [run("a", 5.0, 1.0, 100), run("b", 10.0, 0.0, 80)],
        [run("a", 10.0, 0.5, 125), run("b", 12.5, 2.0, 80)],
        [run("a", 8.0, 0.8, 80), run("b", 8.0, 4.0, 80)],
    ]
    runs = [run for each in rounds for run in each]
    a, b = middle(runs)
    assert a["case"]["name"] == "a" and a["measured"]["tokens_per_s"] == 8.0
    assert error(a, "tokens_per_s") == pytest.approx(0.25) and error(a, "ttft_s") == 0.25
    assert a["errors"]["tokens_per_s"] == pytest.approx([1.0, 0.0, 0.25])
    assert error(b, "tokens_per_s") == 0.0, "the middle of 0, -0.2, and 0.25"
    assert error(b, "ttft_s") == -0.75, "the lower one of two that are known"
    content = content_of(runs, Machine("m", 2, 1 << 34, 3e10, 3e9))
    assert content["runs"] == runs
    assert content["errors"]["tokens_per_s"]["worst"] == pytest.approx(0.25)
    assert content["errors_of_runs"]["tokens_per_s"]["worst"] == 1.0
    assert content["errors_of_runs"]["peak_bytes"]["lowest"] == pytest.approx(-0.2)
    assert content["apart"] == {"median": pytest.approx(0.78125), "worst": 1.0}
    assert "+25% (+0% to +100%)" in table(content) and "single runs" in table(content)
    assert scatter_svg([content]).count("<circle") == 4


def test_what_is_next_to_nothing_of_a_token_is_no_error() -> None:
    def found(gpu_bytes: float) -> float | None:
        step = {"nbytes": {"GPU": gpu_bytes, "CPU": 40.0}}
        run = {
            "case": {"users": 2},
            "predicted": {"host_bytes": 20.0, "step": step},
            "measured": {"host_bytes": 10.0, "disk_bytes": 0.0},
        }
        return error(run, "host_bytes")

    assert found(1000.0) == 1.0
    assert found(1e6) is None


def test_the_matrix_has_what_it_should() -> None:
    found = cpu_cases("a-model")
    assert len(found) >= 24 and len({case.name for case in found}) == len(found)
    assert {case.users for case in found} >= {1, 2, 4, 8}
    assert min(case.prompt for case in found) <= 1024 and max(c.prompt for c in found) > 30_000
    assert {case.kept for case in found} == {0.1, 0.5, 1}
    assert len(gpu_cases()) >= 12 and all(case.gpu_memory for case in gpu_cases())
    assert Case(**json.loads(json.dumps(asdict(found[0])))) == found[0]


def test_kernels_are_compiled_before_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Case] = []

    def run(cases: list[Case], folder: Path, progress: object) -> Iterator[dict[str, Any]]:
        made.extend(cases)
        if len(made) == 1 and cases[0].gpu_memory:
            raise HMTError("no room")
        yield {"name": cases[0].name, "measured": {"pace_changed": 1.0}}

    monkeypatch.setattr(compare, "_run", run)
    cases = gpu_cases()
    found = list(runs_of(cases, Path()))
    assert [run["name"] for run in found] == [case.name for case in cases]
    before, behind = made[: len(cases)], made[len(cases) :]
    assert behind == cases and max(case.tokens for case in before) < min(c.tokens for c in cases)
    assert {case.name for case in before} == {case.name for case in cases}
    models = {(case.model, case.scheme) for case in cases}
    assert {(case.model, case.scheme) for case in before[: len(models)]} == models
    made.clear()
    assert len(list(runs_of(cpu_cases()[:2], Path()))) == 2 == len(made), "only GPUs compile"
    assert len(list(runs_of(cases, Path(), compiled=True))) == len(cases) == len(made) - 2


def test_a_run_is_made_again_while_the_drive_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [(3e9, 1.5e9), (1.5e9, 1.6e9), (0.0, 1e9), (1e9, 2e9), (2e9, 1e9)]
    made: list[str] = []

    def run(cases: list[Case], folder: Path, progress: object) -> Iterator[dict[str, Any]]:
        before, after = rates[len(made)]
        made.append(cases[0].name)
        yield {"number": len(made), "drive": {"before": before, "after": after}}

    monkeypatch.setattr(compare, "_run", run)
    monkeypatch.setattr(compare, "_ATTEMPTS", 2)
    cases = [Case("dense", None, 0.5, 8, 1), Case("moe", None, 0.5, 8, 1)]
    found = list(compare.runs_of([*cases, cases[0]], Path()))
    assert [(run["number"], run["attempts"]) for run in found] == [(2, 1 + 1), (3, 1), (5, 2)]


def test_a_gpus_run_is_made_again_once_if_pythons_pace_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = [1.0, 1.6, 1.5, 1.1]
    made = 0

    def run(cases: list[Case], folder: Path, progress: object) -> Iterator[dict[str, Any]]:
        nonlocal made
        made += 1
        yield {"number": made, "measured": {"pace_changed": changes[made - 1]}}

    monkeypatch.setattr(compare, "_run", run)
    monkeypatch.setattr(compare, "_compile_kernels", lambda cases, folder: None)
    found = list(compare.runs_of(gpu_cases()[:3], Path()))
    assert [(run["number"], run["attempts"]) for run in found] == [(1, 1), (3, 2), (4, 1)]
