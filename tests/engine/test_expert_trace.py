"""Traces of experts: what is written is read back, and it is what the routers chose."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockKind
from hmt.engine.experts.trace import Routed, TraceFile, TraceHeader, TraceWriter
from hmt.weights import WeightStore

TOKENS = list(range(40, 60))
HEADER = TraceHeader("some model", 5, 2, {3: (100,) * 5, 7: (1, 2, 3, 4, 5)})

token = st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True)
scale = st.floats(0, 4, width=16).map(lambda value: round(value, 2))


@st.composite
def records(draw: st.DrawFn) -> list[Routed]:
    made = []
    for step in range(draw(st.integers(0, 4))):
        tokens = draw(st.integers(1, 3))
        rows = st.lists(token, min_size=tokens, max_size=tokens)
        scales = st.lists(st.lists(scale, min_size=2, max_size=2), min_size=tokens, max_size=tokens)
        for layer in (3, 7):
            made.append(Routed(step, layer, draw(rows), draw(scales), draw(st.none() | rows)))
    return made


@given(written=records(), name=st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_written_is_read_back(tmp_path: Path, written: list[Routed], name: str) -> None:
    writer = TraceWriter(tmp_path / name, HEADER)
    for record in written:
        experts, scales = torch.tensor(record.experts), torch.tensor(record.scales)
        writer.routed(record.layer, experts, scales, record.guess)
    writer.close()
    writer.close()
    file = TraceFile(tmp_path / name)
    assert file.header == HEADER
    assert list(file) == list(file) == written


def test_a_record_names_its_blocks_once() -> None:
    record = Routed(0, 3, [[4, 1], [1, 0]], [[1.0, 1.0]] * 2)
    assert [(b.layer, b.kind, b.index) for b in record.blocks()] == [
        (3, BlockKind.EXPERT, expert) for expert in (0, 1, 4)
    ]
    assert sum(HEADER.block_sizes().values()) == HEADER.total_bytes == 515


def lines(**changes: object) -> str:
    header = HEADER.as_json() | changes
    return json.dumps(header) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}\n",
        "no json\n",
        lines(version=2),
        lines(format="other"),
        lines(block_bytes=7),
        lines() + "{}\n",
        lines() + '{"step":0,"layer":4,"experts":[[0,1]],"scales":[[1,1]]}\n',
        lines() + '{"step":0,"layer":3,"experts":[[0,5]],"scales":[[1,1]]}\n',
        lines() + '{"step":0,"layer":3,"experts":[[0,1]],"scales":[[1,1]],"guess":[[-1]]}\n',
        lines() + '{"step":0,"layer":3,"experts":7,"scales":[]}\n',
        lines() + '{"step":0,"lay',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ConfigError, match="trace is not a trace of experts"):
        list(TraceFile(tmp_path / "trace"))


def test_a_file_that_is_not_there_or_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TraceFile(tmp_path / "none")
    (tmp_path / "plain.gz").write_text(lines())
    with pytest.raises(ConfigError, match="is not a trace"):
        TraceFile(tmp_path / "plain.gz")
    whole = gzip.compress(lines().encode() + b"x" * 100_000)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="is not a trace"):
        list(TraceFile(tmp_path / "cut.gz"))


@pytest.fixture
def leased(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Experts that each layer of each step leased, as the store saw it."""
    seen: list[list[int]] = []
    inner = WeightStore.lease_each

    def lease_each(self: WeightStore, blocks: list) -> object:
        seen.append([block.layer for block in blocks][:1] + [block.index for block in blocks])
        return inner(self, blocks)

    monkeypatch.setattr(WeightStore, "lease_each", lease_each)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"host_memory": "64MiB"},
        {"host_memory": "12MiB"},
        {"host_memory": "12MiB", "executor": "plain"},
        {"host_memory": "12MiB", "guesses": False, "expert_cache_policy": "lru"},
    ],
)
def test_a_trace_is_what_the_routers_chose(
    tmp_path: Path, leased: list[list[int]], options: dict[str, object]
) -> None:
    file = tmp_path / "trace.jsonl"
    with hmt.Engine(context=256, expert_trace=str(file), **options) as engine:
        model = engine.load_model(MINI_MOE)
        del leased[:]
        model.logits(TOKENS, [], prefill=12)
    trace = TraceFile(file)
    assert (trace.header.experts, trace.header.top_k, trace.header.layers) == (32, 4, [1, 2, 3, 4])
    found = list(trace)
    chosen = [[record.layer, *(block.index for block in record.blocks())] for record in found]
    assert chosen == leased
    assert [record.step for record in found] == [step for step in range(9) for _ in range(4)]
    assert [len(record.experts) for record in found] == [12] * 4 + [1] * 32
    guessed = [record for record in found if record.guess is not None]
    assert len(guessed) in (0, len(found)), "routers are in memory, or they are not"
    true = sum(
        len(set(token) & set(guess))
        for record in guessed
        for token, guess in zip(record.experts, record.guess, strict=True)  # type: ignore[arg-type]
    )
    if guessed:
        assert true > 0.4 * sum(len(t) for record in guessed for t in record.experts)


def test_tracing_and_guessing_change_no_logits(tmp_path: Path) -> None:
    found = []
    for options in (
        {"host_memory": "64MiB"},
        {"host_memory": "12MiB", "expert_trace": tmp_path / "t", "expert_cache_policy": "lru"},
        {"host_memory": "12MiB", "guesses": False},
        {"host_memory": "64MiB", "expert_trace": tmp_path / "u"},
    ):
        with hmt.Engine(context=256, **options) as engine:
            found.append(engine.load_model(MINI_MOE).logits(TOKENS, range(20), prefill=12))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_trace_that_cannot_be_written_leaves_nothing_allocated(tmp_path: Path) -> None:
    for model, file, message in (
        (MINI_DENSE, tmp_path / "t", "has no experts to trace"),
        (MINI_MOE, tmp_path / "no" / "folder", "cannot be written"),
    ):
        with hmt.Engine(host_memory="64MiB", context=256, expert_trace=file) as engine:
            with pytest.raises(ConfigError, match=message):
                engine.load_model(model)
            assert engine._ledger.reserved_bytes("host") == 0


def test_two_models_do_not_write_one_trace(tmp_path: Path) -> None:
    options = {"host_memory": "64MiB", "context": 256, "expert_trace": tmp_path / "t"}
    with hmt.Engine(**options) as engine, hmt.Engine(**options) as other:
        engine.load_model(MINI_MOE).logits(TOKENS, [], prefill=0)
        with pytest.raises(ConfigError, match="no other model writes"):
            other.load_model(MINI_MOE)
    assert len(list(TraceFile(tmp_path / "t"))) == 80, "what was written is still there"
