"""Timelines: what happened, on tracks that a viewer can draw, and files that are somebody's own."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hmt
from hmt.base.errors import ConfigError
from hmt.base.trace import Event
from hmt.cli.options import embedded_model
from hmt.engine.timeline import chrome_trace

MODEL = embedded_model()
SMALL = {"host_memory": "12MiB", "context": 256}


def slices(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Complete events by the name of their track, in order of time."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return {name: sorted(own, key=lambda e: e["ts"]) for name, own in found.items()}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "wait", "compute", "step", "verify"]),
            st.integers(0, 50),
            st.integers(0, 20),
        )
    )
)
def test_every_event_is_drawn_and_none_covers_another(made: list[tuple[str, int, int]]) -> None:
    events = [Event(k, "disk", 5, 100.0 + b, 100.0 + b + d, 1, "x") for k, b, d in made]
    tracks = slices(chrome_trace(events))
    drawn = [event for own in tracks.values() for event in own]
    zero = min((begin for _, begin, _ in made), default=0)
    assert sorted((e["cat"], e["ts"], e["dur"]) for e in drawn) == sorted(
        (kind, (begin - zero) * 1e6, length * 1e6) for kind, begin, length in made
    )
    for own in tracks.values():
        assert len({event["cat"] for event in own}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))


@pytest.mark.parametrize("executor", ["overlapped", "plain"])
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_run_that_reads_shows_reads_computing_and_waits(
    tmp_path: Path, executor: str, suffix: str
) -> None:
    file = tmp_path / f"timeline.{suffix}"
    with hmt.Engine(**SMALL, executor=executor, trace=str(file)) as engine:
        model = engine.load_model(MODEL)
        model.infer(hmt.Request(input="Once", max_new_tokens=3))
        generation = model.summary().generation
    raw = file.read_bytes()
    tracks = slices(json.loads(gzip.decompress(raw) if suffix.endswith("gz") else raw))
    drives = [event for name, own in tracks.items() if name.startswith("disk") for event in own]
    assert sum(event["args"]["bytes"] for event in drives) >= generation.disk_bytes > 0
    assert {event["name"].split(":")[0] for event in drives} <= {"needed", "ahead"}
    steps = [event["name"] for event in tracks["steps"]]
    assert steps[0].endswith("prompt tokens") and steps[-1] == "1 decoded"
    layers = [event["name"] for event in tracks["layers, with their waits"]]
    assert layers.count("layer 0") == len(steps) and layers.count("head") == 3
    assert {"waiting", "steps"} < set(tracks)


def test_a_timeline_that_cannot_be_written_leaves_nothing_allocated(tmp_path: Path) -> None:
    with hmt.Engine(**SMALL, trace=tmp_path / "no" / "folder") as engine:
        with pytest.raises(ConfigError, match="cannot be written"):
            engine.load_model(MODEL)
        assert engine._ledger.reserved_bytes("host") == 0


def test_two_models_do_not_write_one_timeline(tmp_path: Path) -> None:
    options = {**SMALL, "trace": tmp_path / "t"}
    with hmt.Engine(**options) as engine, hmt.Engine(**options) as other:
        engine.load_model(MODEL).infer(hmt.Request(input="Once", max_new_tokens=2))
        with pytest.raises(ConfigError, match="no other model writes"):
            other.load_model(MODEL)
    assert json.loads((tmp_path / "t").read_text())["traceEvents"]


def test_a_load_that_fails_lets_go_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with hmt.Engine(host_memory="1MiB", trace=file) as engine, pytest.raises(hmt.HMTError):
        engine.load_model(MODEL)
    with hmt.Engine(**SMALL, trace=file) as engine:
        engine.load_model(MODEL)
    assert file.stat().st_size > 0
