"""`python -m hmt_bench cache`: curves of all policies on recorded and synthetic traces."""

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hmt.base.errors import ConfigError
from hmt.engine import EngineConfig
from hmt.weights.eviction import LRU
from hmt_bench.cache import (
    BEST,
    DEFAULT,
    GUESSING,
    RESIDENCIES,
    Trace,
    curve,
    eviction_seconds,
    hit_curves_svg,
    load_traces,
    run,
)
from hmt_bench.policies import POLICIES
from hmt_bench.replay import replay
from hmt_bench.synthetic_trace import synthetic_trace

TRACES = sorted((Path(__file__).parents[2] / "benchmarks" / "traces").glob("*.jsonl.gz"))
LRU_AS_PUBLISHED = {0.0625: 0.37, 0.1875: 0.74, 0.25: 0.81, 0.375: 0.89, 0.64: 0.96}


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return Trace("synthetic", *synthetic_trace(1000))


def test_the_synthetic_trace_is_skewed_as_published(synthetic: Trace) -> None:
    sizes, total = synthetic.header.block_sizes(), synthetic.header.total_bytes
    for residency, published in LRU_AS_PUBLISHED.items():
        capacity = int(residency * total)
        warm = len(synthetic.records) // 4
        found = replay(synthetic.records, sizes, capacity, lambda pressure: LRU(), skip=warm)
        assert found.rate == pytest.approx(published, abs=0.03), residency


def test_the_synthetic_trace_repeats_and_drifts() -> None:
    header, trace = synthetic_trace(30, layers=(2, 5), experts=16, top_k=3, block_bytes=10)
    assert (header.layers, header.total_bytes) == ([2, 5], 320)
    assert trace == synthetic_trace(30, layers=(2, 5), experts=16, top_k=3, block_bytes=10)[1]
    assert trace != synthetic_trace(30, layers=(2, 5), experts=16, top_k=3, seed=1)[1]
    assert all(len(set(record.experts[0])) == 3 for record in trace)
    _, long = synthetic_trace(3000, layers=(0,), experts=64, top_k=8)

    def popular(part: list[Any]) -> set[int]:
        counts = np.bincount([e for record in part for e in record.experts[0]], minlength=64)
        return set(np.argsort(-counts)[:8].tolist())

    near = len(popular(long[:100]) & popular(long[100:200]))
    far = len(popular(long[:100]) & popular(long[-100:]))
    assert near > far, "who is popular changes with time"


def test_recorded_traces_are_small_and_of_every_kind() -> None:
    assert [file.name.split("-")[-1] for file in TRACES] == [
        f"{kind}.jsonl.gz" for kind in ("chat", "code", "prose", "tables")
    ]
    assert sum(file.stat().st_size for file in TRACES) < 300_000


def test_the_default_policy_is_the_best_of_all_on_recorded_traces() -> None:
    joined = load_traces(TRACES)[-1]
    residencies = (0.25, 0.5, 0.75)
    curves = {name: curve(joined, name, residencies).rates for name in POLICIES}
    assert EngineConfig.resolve(host_memory="1GiB").expert_cache_policy == DEFAULT
    for name, rates in curves.items():
        assert all(np.array(curves[DEFAULT]) >= np.array(rates)), name


def test_85_percent_come_from_memory_where_the_documentation_says_so() -> None:
    joined = load_traces(TRACES)[-1]
    assert curve(joined, DEFAULT, (0.65,)).rates[0] >= 0.85
    assert curve(joined, GUESSING, (0.5,)).rates[0] >= 0.85


def test_curves_rise_to_the_best_and_draw_as_a_picture(synthetic: Trace) -> None:
    header, records = synthetic.header, synthetic.records[:200]
    guessed = [record._replace(guess=record.experts) for record in records]
    content = run([Trace("a <trace>", header, guessed), Trace("b", header, records)])
    assert json.loads(json.dumps(content)) == content
    assert content["residencies"] == list(RESIDENCIES)
    first, second = content["results"]
    assert [c["policy"] for c in first["curves"]] == [*POLICIES, GUESSING, BEST]
    assert GUESSING not in [c["policy"] for c in second["curves"]]
    for found in first["curves"]:
        assert list(found["rates"][2:]) == sorted(found["rates"][2:])
    perfect = first["curves"][-2]
    assert min(perfect["rates"][1:]) > 0.95, "who foresees all that comes waits for nothing"
    assert all(0 < us < 1e5 for us in content["eviction_us"].values())
    assert first["foreseen"]["recall"] == first["foreseen"]["absent_recall"] == 1.0
    assert first["foreseen"]["right_by_rank"] == [100.0] * 8
    assert second["foreseen"] is None
    scan, lru = np.array(content["dense"]["scan"]), np.array(content["dense"]["lru"])
    fits = np.array(content["dense_residencies"])
    assert np.all(lru == 1.0) and np.all(scan - (1 - fits) < 0.02)
    drawn = xml.fromstring(hit_curves_svg(content))
    points = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    curves = len(first["curves"]) + len(second["curves"])
    assert len(points) == curves * len(content["residencies"])


def test_a_victim_among_many_costs_no_more_than_among_few() -> None:
    for name in POLICIES:
        assert 0 < eviction_seconds(name, 200) < 1


def test_traces_of_one_model_are_also_joined(tmp_path: Path) -> None:
    assert [trace.name for trace in load_traces([])] == ["synthetic"]
    assert [trace.name for trace in load_traces(TRACES[:1])] == ["mini-moe-chat"]
    joined = load_traces(TRACES[:2])
    assert joined[-1].name == "one after the other"
    assert len(joined[-1].records) == sum(len(trace.records) for trace in joined[:-1])
    header = joined[0].header
    (tmp_path / "empty").write_text(json.dumps(header.as_json()) + "\n")
    with pytest.raises(ConfigError, match="no steps"):
        load_traces([tmp_path / "empty"])
