"""`hmt bench serve` as a user meets it: a server that is started, measured and stopped."""

import json

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_users_on_a_server_of_our_own(hmt, tmp_path):
    before = psutil.Process().children()
    file, page = tmp_path / "serve.json", tmp_path / "serve.html"
    done = hmt(
        "bench", "serve", "--prompts", "32", "--outputs", "8", "--users", "1,2", "--requests", "2",
        "--serve", "--threads 1 --host-memory 64MiB", "--json", file, "--html", page,
    )  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads(file.read_text())
    assert content["model"] == "mini-dense" and content["ignore_eos"] and content["usage"]
    assert content["machine"]["name"] and content["machine"]["cpus"] == psutil.cpu_count()
    for cell, users in zip(content["results"], (1, 2), strict=True):
        assert (cell["users"], cell["succeeded"], cell["failures"]) == (users, 2, {})
        assert [one["tokens"] for one in cell["each"]] == [8, 8]
        assert cell["mean_prompt_tokens"] == pytest.approx(32, rel=0.3)
        assert 0 < cell["ttft_s"]["p50"] <= cell["e2e_s"]["p50"] <= cell["wall_s"]
        assert cell["server_rss_bytes"] > 0 and cell["server_cpu_cores"] >= 0
    assert "1 user " in done.out and "2 users" in done.out and "mini-dense" in done.out
    assert "<svg" in page.read_text()
    assert psutil.Process().children() == before, "the server is gone"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--users", "0"], "--users 0"),
        (["--users", "1.5"], "whole numbers"),
        (["--rates", "much"], "--rates much"),
        (["--users", ""], "nothing to measure"),
        (["--url", "localhost:8000"], "--url localhost:8000"),
        (["--url", "http://x", "--serve", "--context 9"], "a server that runs"),
        (["--api-key-file", "no-such-file"], "no-such-file"),
        (["--api-key", "größe"], "no header can hold"),
    ],
)
def test_wrong_options_are_told(hmt, options, said):
    done = hmt("bench", "serve", *options)
    assert done.code == 2 and said in " ".join(done.err.split())
