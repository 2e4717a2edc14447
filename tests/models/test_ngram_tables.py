"""Tables of n-grams: which rows, against transformers; the same from the disk as from memory."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from default_part import after_first
from hybrid_models import ids, publish
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_memory import bench_of, random_reference
from random_configs import Case, cases
from safetensors.torch import save_file
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

import hmt
from hmt.base.errors import CheckpointError, DiskReadError, MissingFileError, ShapeError
from hmt.base.trace import Tracer
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.model import ModelSpec
from hmt.contracts.plan import Tier
from hmt.contracts.step import SchedulerOutput, SegmentRequest, Step
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.packs import convert
from hmt.formats import open_checkpoint
from hmt.layers import NGramHash
from hmt.memory import HostPool, Ledger, ReadQueue
from hmt.memory.disk.readers import PreadReader
from hmt.models import open_model
from hmt.planner import PlanOptions, explain, smallest_budget, solve
from hmt.planner.what_if.placement_reasons import reasons
from hmt.weights import bind, lay_out, row_span_bytes
from hmt.weights.layout import BlockLayout
from hmt.weights.store.row_lookup import RowLookup
from hmt.weights.store.row_reader import RowReader

NAMES = [case.name for case in cases("qwen4_exp_text")]
OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 256, "max_prefill_tokens": 48}
OPTIONS |= {"max_batch": 2}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), longest=st.integers(2, 5), heads=st.integers(1, 4))
def test_rows_are_those_of_transformers_in_any_chunks(
    data: st.DataObject, longest: int, heads: int
) -> None:
    number, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 1 << 40))
    vocab = data.draw(st.sampled_from([3, 700, 248_320]))
    least = data.draw(st.sampled_from([2, 90, 20_000]))
    hashed = NGramHash(longest, heads, vocab, number, least, seed, eos=1)
    [case] = cases("qwen4_exp_text")[:1]
    case.config.update(
        {"ngram_size": longest, "heads_per_ngram": heads, "vocab_size": vocab, "seed": seed}
        | {"ngram_vocab_size_base": least, "eos_token_id": 1}
    )
    theirs = Qwen4ExpTextNGramEmbedding(case.config, 2 * hashed.rows_per_token, 0, number)
    assert theirs.layer_multipliers.tolist() == hashed.factors
    assert theirs.head_vocab_sizes == list(hashed.ranges)
    # Its rows say which they are.
    theirs.ngram_embedding = torch.nn.Embedding(hashed.rows, 1, dtype=torch.float64)
    theirs.ngram_embedding.weight.data = torch.arange(hashed.rows)[:, None].double()
    token = st.one_of(st.just(1), st.integers(0, vocab - 1))
    texts = data.draw(st.lists(st.lists(token, min_size=1, max_size=20), min_size=1, max_size=3))
    rng = random.Random(seed)
    wanted = [theirs(torch.tensor([text]), None)[0].long() for text in texts]
    at = [0] * len(texts)
    while any(place < len(text) for place, text in zip(at, texts, strict=True)):
        parts, rows = [], []
        for sequence, text in enumerate(texts):
            count = rng.randint(0, len(text) - at[sequence])
            if count:
                first = at[sequence]
                before = tuple(text[max(0, first - longest + 1) : first])
                tokens = text[first : first + count]
                parts.append(SegmentRequest(sequence, first, tokens, 0, preceding=before))
                rows.append(wanted[sequence][first : first + count])
                at[sequence] += count
        if parts:
            assert torch.equal(hashed.row_ids(Step.build(parts)), torch.cat(rows))
    output = SchedulerOutput((SegmentRequest(3, 2, [1, 2], 1, preceding=(8, 9)),))
    assert SchedulerOutput.from_json(output.to_json()) == output


def test_a_run_that_does_not_know_what_precedes_it_is_refused() -> None:
    hashed = NGramHash(3, 2, 700, 0, 90, 1234, eos=1)
    for preceding in ((), (4,)):
        step = Step.build([SegmentRequest(0, 9, [5], 0, preceding=preceding)])
        with pytest.raises(AssertionError, match="tokens before it"):
            hashed.row_ids(step)


@pytest.mark.parametrize("case", cases("qwen4_exp_text"), ids=lambda case: case.name)
def test_rows_are_asked_for_before_any_layer_and_used_once(case: Case, tmp_path: Path) -> None:
    bench = bench_of(random_reference(case.config, case.seed), tmp_path)
    lookups = bench.model.spec.row_lookups
    assert len(lookups) == len(case.config.ple_layer_ids)
    step, weights = Step.build([(0, 0, [3, 4, 5, 6], 1)]), bench.weights
    bench.model.embed(step, weights)
    asked = {block: len(rows) for block, rows in weights.requested_rows.items()}
    assert asked == {block: 4 * count for block, count in lookups.items()} and not weights.leased
    bench.run((0, 0, [3, 4, 5, 6]), (1, 0, [8]))
    assert not weights.requested_rows


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            publish(name, made[name], 256)
        return made[name]

    return folder


def least_of(folder: Path) -> int:
    prepared = prepare(folder, EngineConfig.resolve(host_memory="64MiB", **OPTIONS))
    return smallest_budget(prepared.demand, PlanOptions(0, 256, 48))


def answers(folder: Path, **options: Any) -> tuple[Any, list[Any], str]:
    """What a model says in several ways; its plan."""
    tokens = ids(100, 3)
    with hmt.Engine(**OPTIONS | options) as engine:
        model = engine.load_model(folder)
        found: list[Any] = [model.logits(tokens, range(100), prefill=70)]
        requests = [hmt.Request(ids(n, n), 6, ignore_eos=True) for n in (5, 60, 33)]
        found += [answer.token_ids for answer in model.infer_batch(requests)]
        asked = hmt.Request(tokens[:37], 5, ignore_eos=True)
        beams = model.beam_search(asked, 2)
        found += [beam.token_ids for beam in beams]
        # A beam's score is what its tokens have when they are given.
        text = [*tokens[:37], *beams[0].token_ids]
        said = model.logits(text, range(36, len(text) - 1), prefill=20).log_softmax(-1)
        given = said.gather(1, torch.tensor(text[37:])[:, None]).mean()
        assert abs(float(given) - (beams[0].score or 0)) < 1e-4
        plan, prepared = model.plan, model.prepared
        shown = [explain(plan, prepared.demand, prepared.machine)]
        shown += reasons(plan, prepared.demand, prepared.machine)
        return plan, found, "\n".join(shown)


@pytest.mark.parametrize("name", after_first(NAMES))
def test_a_table_on_disk_gives_the_bits_of_one_in_memory(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """By either executor, and from a pack, whose rows have checksums."""
    folder = folder_of(name)
    plan, wanted, shown = answers(folder, host_memory="64MiB")
    tables = [block for block in plan.homes if block.kind == "embedding" and block.index]
    assert tables and all(plan.homes[table] is Tier.HOST for table in tables)
    assert all(f"the table {table}" in shown for table in tables)
    convert(folder, tmp_path / "pack", EngineConfig.resolve(dtype="float32"))
    for place, executor in ((folder, "plain"), (tmp_path / "pack", "overlapped")):
        plan, found, shown = answers(place, host_memory=least_of(place), executor=executor)
        assert all(plan.homes[table] is Tier.DISK for table in tables)
        assert "is on the disk" in shown and "n-grams" in shown
        assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:]


def test_tables_take_memory_last(folder_of: Callable[[str], Path]) -> None:
    """With memory for all else there is room for nothing, the smaller table, or both."""
    folder = folder_of(NAMES[2])
    prepared = prepare(folder, EngineConfig.resolve(host_memory="64MiB", **OPTIONS))
    demand = prepared.demand
    lookups = prepared.model.spec.row_lookups
    # As large as they are published in proportion, the second twice the first.
    blocks = tuple(
        replace(b, slot_bytes=(b.id.index - 1) << 20) if b.id in lookups else b
        for b in demand.blocks
    )
    demand, tables = replace(demand, blocks=blocks), sorted(lookups)
    assert [table.index for table in tables] == [2, 3] and list(lookups.values()) == [3, 3]
    least, seen = smallest_budget(demand, PlanOptions(0, 256, 48)), []
    for extra in range(0, 6 << 20, 1 << 17):
        plan = solve(demand, PlanOptions(least + extra, 256, 48), prepared.machine)
        on_host = [table for table in tables if plan.homes[table] is Tier.HOST]
        assert not on_host or all(
            home is Tier.HOST for block, home in plan.homes.items() if block not in tables
        )
        assert sum(plan.reserved.values()) <= least + extra
        seen.append(on_host)
    assert seen[0] == [] and seen[-1] == tables
    assert seen == sorted(seen, key=len) and tables[:1] in seen


def write_shards(folder: Path, counts: dict[int, int]) -> torch.Tensor:
    """A checkpoint of a table alone, with so many rows in each shard."""
    rows = torch.randn(sum(counts.values()), 6)
    parts = rows.split([counts[number] for number in sorted(counts)])
    names = [f"model.t.shard_{number}.weight" for number in sorted(counts)]
    kept = {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return rows


def bound(folder: Path, rows: int) -> BlockLayout:
    """How the table of `rows` rows is laid out."""
    block = BlockId(TRUNK, BlockKind.EMBEDDING)
    table = ParamSpec("weight", (rows, 6), ("model.t.weight",), Role.TABLE)
    spec = ModelSpec("Any", 1, 6, rows, 64, (BlockSpec(block, (table,)),), (None,), 0)
    return lay_out(bind(spec, open_checkpoint(folder)), lambda param, where: None)[block]


def test_shards_are_rows_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """More than ten of unequal sizes, so that names in alphabetical order are wrong."""
    counts = {number: 2 + number % 3 for number in range(12)}
    rows = write_shards(tmp_path, counts)
    layout = bound(tmp_path, len(rows))
    assert layout.parameter_bytes == rows.nbytes
    room = 40 * row_span_bytes(layout.tables["weight"])
    pool = HostPool(Ledger({Tier.HOST: room}).open(Tier.HOST, "rows", room))
    queue = ReadQueue(PreadReader(), Tracer(), depth=2)
    reader = RowReader(queue, pool)
    slot = torch.empty(layout.slot_bytes, dtype=torch.uint8)
    for read in layout.reads:
        content = read.file.path.read_bytes()[read.file.offset :][: read.file.nbytes]
        slot[read.at : read.at + len(content)] = torch.frombuffer(
            bytearray(content), dtype=torch.uint8
        )
    for count in (1, 9, 200):
        wanted = torch.randint(0, len(rows), (count,))
        assert torch.equal(reader.from_disk(layout, "weight", wanted), rows[wanted])
        views = layout.views(slot)
        found = RowReader.from_memory(layout, "weight", wanted, {layout.id: views}.__getitem__)
        assert torch.equal(found, rows[wanted])
    queue.close()
    reader.close()
    pool.close()
    with pytest.raises(ShapeError, match="do not belong together"):
        bound(tmp_path, len(rows) + 1)
    write_shards(tmp_path, {number: 2 for number in range(12) if number != 7})
    with pytest.raises(
        MissingFileError, match=r"lacks 1 of 12 shards, first model.t.shard_7.weight"
    ):
        open_checkpoint(tmp_path)


class SlowReader:
    """A RowReader whose reads wait until they may end; counts them."""

    def __init__(self) -> None:
        self.may_end, self.calls = threading.Event(), []

    def from_disk(self, layout: BlockLayout, name: str, ids: torch.Tensor) -> torch.Tensor:
        self.calls.append(ids.tolist())
        assert self.may_end.wait(30)
        if 13 in self.calls[-1]:
            raise DiskReadError("an unlucky row")
        return ids[:, None] * 2

    def close(self) -> None:
        pass


def test_rows_are_read_ahead_once_and_what_is_asked_is_answered(tmp_path: Path) -> None:
    write_shards(tmp_path, {0: 30, 1: 30})
    layout, reader = bound(tmp_path, 60), SlowReader()
    lookup = RowLookup(cast(RowReader, reader), Tracer())
    first, second = torch.tensor([5, 40]), torch.tensor([6])
    lookup.request(layout, "weight", first)  # returns, though nothing has been read
    while not reader.calls:
        time.sleep(0.001)
    reader.may_end.set()
    assert lookup.rows(layout, "weight", first)[0].tolist() == [[10], [80]]
    assert reader.calls == [[5, 40]]
    # Asked for and then not wanted, others wanted, wanted a second time: the answer is right.
    lookup.request(layout, "weight", first)
    assert lookup.rows(layout, "weight", second)[0].tolist() == [[12]]
    assert lookup.rows(layout, "weight", first)[0].tolist() == [[10], [80]]
    lookup.request(layout, "weight", first)
    lookup.abandon()
    lookup.request(layout, "weight", torch.tensor([60]))  # no row of it: `rows` is refused
    # An error comes to whom the rows are for, and only there.
    lookup.request(layout, "weight", torch.tensor([13]))
    with pytest.raises(DiskReadError, match="unlucky"):
        lookup.rows(layout, "weight", torch.tensor([13]))
    lookup.request(layout, "weight", torch.tensor([13]))
    lookup.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ngram_vocab_size_base": 1 << 40}, "ngram_vocab_size_base is .* from 1 to"),
        ({"ple_conv_kernel_size": 40}, "reaches back"),
        ({"make_ngram_vocab_size_divisible_by": 0}, "divisible_by is 0"),
        ({"heads_per_ngram": 60, "ngram_size": 11, "ple_embed_dim": 600}, "600 hashes"),
        ({"hc_count": 10**9}, "hc_count is .* from 1 to 64"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the length",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], said: str) -> None:
    [case] = cases("qwen4_exp_text")[:1]
    config = case.config.to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]} | fields
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=said):
        open_model(config, Path("there"), torch.float32)
    assert time.monotonic() - begin < 20
