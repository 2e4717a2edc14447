"""`python -m hmt_bench prefix` as a user meets it: three processes that give one answer."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_a_prompt_that_comes_again_is_read(bench, tmp_path):
    file = tmp_path / "prefix.json"
    options = ["--tokens", "1000", "--runs", "1", "--folder", tmp_path, "--json", file]
    done = bench("prefix", *options)
    assert done.code == 0, done.err
    kept, read, computed = json.loads(file.read_text())["results"]
    assert [one["computed_tokens"] for one in (kept, read, computed)] == [1000, 8, 1000]
    assert [one["pages_read"] for one in (kept, read, computed)] == [0, 62, 0]
    for result in (kept, read, computed):
        assert result["case"] in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.json"], "nothing is left behind"


def test_a_text_that_is_too_short_is_told(bench, tmp_path):
    (tmp_path / "text").write_text("Too short.")
    done = bench("prefix", "--text", tmp_path / "text")
    assert done.code == 2 and "30000 tokens were asked for" in " ".join(done.err.split())
