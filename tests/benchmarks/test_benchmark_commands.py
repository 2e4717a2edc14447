"""Benchmarks' commands: what they write, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch

NOWHERE = "/proc/nowhere"


def test_the_gpu_is_not_measured_where_there_is_none(bench):
    done = bench("gpu", "--shape", "tiny")
    assert done.code == 2 and "8b or 70b" in done.err
    done = bench("gpu", "--batches", "1,x")
    assert done.code == 2 and "such as 1,32" in done.err
    done = bench("gpu", "--gpu-id", "fake")
    assert done.code == 1 and "has no rates" in done.err
    if not torch.cuda.is_available():
        done = bench("gpu", "--shape", "small")
        assert done.code == 1 and "hmt doctor says what this machine has" in done.err


def test_traces_are_recorded_and_replayed(bench, tmp_path):
    moe = Path(__file__).parents[2] / "assets" / "mini-moe"
    done = bench("traces", moe, tmp_path / "traces", "--tokens", "40")
    assert done.code == 0
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == [
        f"mini-moe-{kind}.jsonl.gz" for kind in ("chat", "code", "prose", "tables")
    ]
    results, picture = tmp_path / "new" / "cache.json", tmp_path / "curves.svg"
    done = bench("cache", *files[:2], "--json", results, "--svg", picture)
    assert done.code == 0
    for word in ("heat and guesses", "best possible", "one after the other", "scan"):
        assert word in done.out
    content = json.loads(results.read_text())
    assert [result["trace"] for result in content["results"]] == [
        "mini-moe-chat",
        "mini-moe-code",
        "one after the other",
    ]
    assert content["machine"]["cores"] >= 1
    assert picture.read_text().startswith("<svg")


def test_what_is_no_trace_is_named(bench):
    done = bench("cache", Path(__file__))
    assert done.code != 0 and "is not a trace of experts" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("predictions", "--folder", NOWHERE), "--folder /proc/nowhere cannot be used"),
        (("predictions", "--json", NOWHERE), "--json /proc/nowhere cannot be used"),
        (("pages", "--svg", "/dev/null/x.svg"), "--svg /dev/null/x.svg cannot be used"),
        (("peer", "--folder", "/dev/null"), "name a folder that takes files"),
        (("traces", "assets/mini-moe", NOWHERE), "the folder /proc/nowhere cannot be"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(bench, words, told):
    outcome = bench(*words)
    assert outcome.code == 2 and told in outcome.err and not outcome.out


def test_a_text_that_is_none_is_told(bench, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"\xff\xfe\x00")
    outcome = bench("traces", "assets/mini-moe", tmp_path, "--text", file)
    assert outcome.code == 2 and f"{file} cannot be read" in outcome.err


def test_watching_is_timed_and_drift_is_counted(bench, tmp_path):
    file = tmp_path / "drift.json"
    options = ["--pieces", "2", "--sequences", "6", "--runs", "1", "--host-memory", "256MiB"]
    done = bench("drift", "--quant", "w4a8", *options, "--json", file)
    assert done.code == 0, done.err
    content = json.loads(file.read_text())
    assert [cost["case"] for cost in content["costs"]] == [
        "one user decodes", "eight users decode", "prompts",
    ]  # fmt: skip
    assert content["alarms"]["three tokens again and again"] == [2, 2]
    assert content["alarms"]["held-out"][1] == 2
    assert "held-out: " in done.out and "more time" in done.out
