"""The command `soak` in seconds: all kinds of users, models that come and go, an orderly end."""

import json

import pytest

from hmt_bench.soak.idle_check import IdleState, judge_growth

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_a_short_soak(bench, tmp_path):
    file = tmp_path / "soak.json"
    done = bench(
        "soak", "--seconds", "3", "--parts", "2", "--users", "6", "--questions", "6",
        "--context", "1024", "--host-memory", "64MiB", "--json", file,
    )  # fmt: skip
    content = json.loads(file.read_text())
    verdict = content["verdict"]
    # Seconds are too few to tell: workers are started when they are first wanted.
    for name in ("rss_flat", "threads_flat", "passed"):
        verdict.pop(name)
    assert all(verdict.values()), (content, done.err)
    assert content["wrong"] == [] and content["answers_compared"] > 10
    assert {"asks", "streams", "cancels", "malforms", "load", "unload"} <= set(content["outcomes"])
    assert content["shutdown"]["exit_status"] == 0
    assert "no wrong answer: yes" in done.out


def at(rss_mib, threads=9, descriptors=11, pages=0, inside=0):
    return IdleState(0.0, 0, rss_mib << 20, threads, descriptors, pages, inside)


@pytest.mark.parametrize(
    ("name", "rests"),
    [
        (None, [at(500), at(530), at(498), at(505), at(531), at(503)]),
        ("rss_flat", [at(500), at(505), at(510), at(515), at(520), at(525)]),
        (None, [at(500), at(500, threads=11), at(500, threads=11), *[at(500, threads=10)] * 3]),
        ("threads_flat", [at(500), at(500, threads=10)]),
        ("descriptors_flat", [at(500), at(500, descriptors=12)]),
        ("pages_free", [at(500), at(500, pages=1), at(500)]),
        ("nothing_left_inside", [at(500, inside=1), at(500)]),
    ],
)
def test_what_grew_is_told(name, rests):
    verdict = judge_growth(rests)
    figures = verdict.pop("figures")
    assert [one for one, fine in verdict.items() if not fine] == ([name] if name else [])
    assert len(figures["rests"]) == len(rests)
