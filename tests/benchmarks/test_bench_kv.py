"""`python -m hmt_bench kv` as a user meets it."""

import json

import pytest


@pytest.mark.parametrize("gpu", [[], ["--gpu-memory", "128MiB", "--gpu-id", "fake"]])
def test_scores_are_shown_and_written(bench, tmp_path, gpu):
    file = tmp_path / "new" / "kv.json"
    extent = ["--retrieval", "512x1", "--tasks", "1", "--windows", "0"]
    outcome = bench("kv", "--settings", "full cold:int8+parts", *extent, *gpu, "--json", file)
    assert outcome.code == 0, outcome.err
    shown = [line.split() for line in outcome.out.splitlines()[2:]]
    results = json.loads(file.read_text())["results"]
    assert [line[0] for line in shown] == [r["setting"] for r in results]
    assert [r["setting"] for r in results] == ["full", "cold:int8+parts"]
    for result in results:
        assert result["retrieval"]["512"] == [8, 8]
        assert result["length"] == 512


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--retrieval", "2048"], "such as 2048x8,8192x4"),
        (["--retrieval", "0x8"], "such as 2048x8,8192x4"),
        (["--settings", "int8"], "write full, near:fp8, warm:NAME"),
        (["--settings", "cold:int8-static"], "needs a file with scales, after @"),
        (["--text", "nowhere.txt"], "give one with --text"),
    ],
)
def test_options_that_make_no_sense_are_told(bench, options, told):
    outcome = bench("kv", *options)
    assert outcome.code == 2 and told in " ".join(outcome.err.split())
