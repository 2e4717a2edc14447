"""Runs are predicted and measured in the same terms, before and after a model's first run."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hmt.base.errors import HMTError
from hmt.hardware.machine import machine_for
from hmt.profiling.random_model import Shape
from hmt_bench.predictions import (
    Case,
    cases,
    compare,
    content_of,
    cpu_cases,
    error,
    gpu_cases,
    process,
    runs_of,
    summed_up,
    table,
)

pytestmark = pytest.mark.usefixtures("quick_processes")

TINY = Shape(2, 64, 128, 4, 2, experts=4, experts_per_token=2)


def test_a_run_is_measured_in_the_terms_of_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases.WRITTEN, "moe", TINY)
    case = Case("moe", None, 0.3, 40, 2, 24)
    streamed = process.run(case, tmp_path) | {"earlier_runs": 0}
    predicted, measured = streamed["predicted"], streamed["measured"]
    assert measured["tokens_per_s"] > 0 and measured["ttft_s"] > 0
    assert predicted["peak_bytes"] > 0 and predicted["disk_bytes"] > 0
    kept = process.run(replace(case, model="mini-dense", kept=1, users=1), tmp_path)
    assert kept["predicted"]["disk_bytes"] == kept["measured"]["disk_bytes"] == 0
    assert error(kept, "disk_bytes") is None
    content = content_of([streamed, kept | {"earlier_runs": 1}], machine_for(tmp_path))
    assert content["errors"]["first_run"]["disk_bytes"]["runs"] == 1
    assert "disk_bytes" not in content["errors"]["second_run"]
    assert json.loads(json.dumps(content)) == content
    assert table(content).row_count == 2


def test_the_second_run_of_a_case_knows_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    def run(case: Case, folder: Path, cache: str) -> dict[str, Any]:
        folders.append(cache)
        return {"case": case.name}

    monkeypatch.setattr(compare, "_run", run)
    runs = list(runs_of([Case("dense"), Case("moe")], tmp_path))
    assert [run["earlier_runs"] for run in runs] == [0, 1, 0, 1]
    assert folders[0] == folders[1] != folders[2] == folders[3]


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(HMTError, match="no-such-folder"):
        list(runs_of([Case(str(tmp_path / "no-such-folder"))], tmp_path))


def test_errors_are_summed_up() -> None:
    def run(predicted: float, measured: float) -> dict[str, Any]:
        same = dict.fromkeys(("ttft_s", "disk_bytes"), 0.0)
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


def test_the_matrix_has_what_it_should() -> None:
    found = cpu_cases(("a-model",))
    assert len(found) == 12 and len({case.name for case in found}) == len(found)
    assert {case.kept for case in found} == {0.1, 0.5, 1}
    assert all(case.gpu_memory for case in gpu_cases())
    assert Case(**json.loads(json.dumps(asdict(found[0])))) == found[0]
