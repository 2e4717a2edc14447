"""Attention over pages against its definition in float64, on every instruction set."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import SANITIZED, without_tiles

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

NATIVE = extension.load()
ISAS = without_tiles(NATIVE) if NATIVE is not None else ["reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ENCODINGS = list(PageEncoding)
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=ISAS)
def isa(request):
    if NATIVE is None:
        yield
        return
    before = NATIVE.isa()
    NATIVE.set_isa(request.param)
    yield
    NATIVE.set_isa(before)


@pytest.fixture
def two_threads():
    pool = None if NATIVE is None else NATIVE.threads()
    before = torch.get_num_threads()
    if NATIVE is not None:
        NATIVE.set_threads(2)
    yield
    if NATIVE is not None:
        NATIVE.set_threads(pool)
    torch.set_num_threads(before)


class Scene:
    """Pages of three layers in shuffled order, filled up to each run's end."""

    def __init__(self, layout, runs, dtype=torch.float32, seed=0, spread=1.0, layer=1):
        random = torch.Generator().manual_seed(seed)
        self.layout, self.layer = layout, layer
        counts = [-(-(start + length) // 16) for start, length in runs]
        order = torch.randperm(sum(counts) + 2, generator=random)
        # What was not written is not a number: nobody may read it, or it has no influence.
        memory = torch.full((len(order), 3, layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.pages = Pages(layout, memory)
        self.tables = list(order[: sum(counts)].split(counts))
        offsets = [sum(length for _, length in runs[:i]) for i in range(len(runs))]
        self.runs = [
            PagedSegment(offset, length, start, table)
            for offset, (start, length), table in zip(offsets, runs, self.tables, strict=True)
        ]
        self.tokens = sum(length for _, length in runs)
        heads, dims = layout.heads, (layout.key_dim, layout.value_dim)
        self.contexts = []
        for run in self.runs:
            end = run.start + run.length
            key, value = (
                (torch.randn(end, heads, dim, generator=random) * spread).to(dtype) for dim in dims
            )
            value = None if layout.latent else value
            whole = AttentionMetadata([PagedSegment(0, end, 0, run.table)])
            ops.append_pages(self.pages, layer, whole, key, value)
            self.contexts.append((key, value))
        self.random, self.dtype = random, dtype

    def query(self, heads, dtype=None, spread=1.0):
        shape = (self.tokens, heads, self.layout.key_dim)
        return (torch.randn(shape, generator=self.random) * spread).to(dtype or self.dtype)

    def attend(self, query, **options):
        runs = AttentionMetadata(self.runs)
        return ops.paged_attention(self.pages, self.layer, runs, query, **options)

    def exact(self, query, **options):
        """The definition in float64, of what the pages hold."""
        parts = []
        for run in self.runs:
            end = run.start + run.length
            held = reference.read_pages(self.pages, self.layer, run.table, end)
            rows = query[run.offset : run.offset + run.length]
            parts.append(exact(rows, *held, start=run.start, **options))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def exact(query, key, value, *, start, scale, window=0, softcap=0.0, sinks=None):
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,chd->qhc", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, positions = torch.arange(start, start + len(query))[:, None], torch.arange(len(key))
    visible = positions <= at
    if window:
        visible &= positions > at - window
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None].expand(len(query), -1, 1)
        scores = torch.cat((scores, column), dim=-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    return torch.einsum("qhc,chd->qhd", weights[..., : len(key)], value), lse


def check(scene, query, **options):
    out, lse = scene.attend(query, **options)
    expected, expected_lse = scene.exact(query, **options)
    assert out.dtype == query.dtype and lse.dtype == torch.float32
    near = NEAR[query.dtype]
    scale = max(1.0, expected.abs().max().item())
    rounding = query_rounding(scene, query, options["scale"])
    atol = near * scale + rounding * max(1.0, largest_value(scene))
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=near)
    torch.testing.assert_close(lse.double(), expected_lse, atol=3e-4 + rounding, rtol=3e-5)


def query_rounding(scene, query, scale):
    """How far scores may be off where int8 pages meet queries of 15 bits: some standard deviations.

    Each number of a query is off by at most half a step, independently of the others.
    """
    if scene.layout.encoding is not PageEncoding.INT8 or not query.numel():
        return 0.0
    step = query.abs().max().item() / 16383
    norms = [key.double().norm(dim=-1).max().item() for key, _ in scene.contexts if key.numel()]
    return 2 * step * abs(scale) * max(norms, default=0.0) + 2.0**-15


def largest_value(scene):
    values = [key if value is None else value for key, value in scene.contexts]
    return max((x.abs().max().item() for x in values if x.numel()), default=0.0)


@given(
    runs=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=3),
    shape=st.sampled_from(
        [
            (1, 1, 8, 8),
            (4, 4, 32, 32),
            (8, 2, 64, 64),
            (8, 1, 80, 80),
            (7, 1, 24, 20),
            (4, 2, 128, 128),
            (2, 2, 192, 128),
            (3, 1, 40, 33),
        ]
    ),
    encoding=st.sampled_from(ENCODINGS),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 0, 1, 5, 16, 33]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
    isa=st.sampled_from(ISAS),
)
@settings(max_examples=100, deadline=None)
def test_it_is_its_definition(runs, shape, encoding, dtype, window, softcap, sinks, seed, isa):
    q_heads, heads, key_dim, value_dim = shape
    before = None if NATIVE is None else NATIVE.isa()
    if NATIVE is not None:
        NATIVE.set_isa(isa)
    try:
        scene = Scene(PageLayout(encoding, heads, key_dim, value_dim), runs, dtype, seed)
        query = scene.query(q_heads)
        options = {"scale": key_dim**-0.5, "window": window, "softcap": softcap}
        if sinks:
            options["sinks"] = torch.randn(q_heads, generator=scene.random) * 2
        check(scene, query, **options)
    finally:
        if NATIVE is not None:
            NATIVE.set_isa(before)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("dims", "heads"), [((576, 512), 16), ((40, 32), 5), ((24, 8), 3)])
def test_latent_values_are_the_beginning_of_keys(isa, encoding, dims, heads):
    for dtype in (torch.float32, torch.bfloat16):
        layout = PageLayout(encoding, 1, *dims, latent=True)
        scene = Scene(layout, [(0, 5), (40, 1), (75, 3)], dtype)
        check(scene, scene.query(heads), scale=dims[0] ** -0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (16, 1, 32, 32), (3, 3, 128, 128)])
def test_long_runs_in_many_tiles(isa, dtype, shape):
    q_heads, heads, *dims = shape
    layout = PageLayout(PageEncoding.of(dtype), heads, *dims)
    scene = Scene(layout, [(0, 70), (130, 57), (333, 1)], dtype)
    check(scene, scene.query(q_heads), scale=0.125)
    check(scene, scene.query(q_heads), scale=0.125, window=90)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_long_contexts_in_many_chunks(isa, encoding):
    scene = Scene(PageLayout(encoding, 2, 64, 64), [(1999, 1), (700, 2)], torch.bfloat16)
    sinks = torch.tensor([0.5, -math.inf, 3.0, 20.0])
    check(scene, scene.query(4), scale=0.125, sinks=sinks)
    check(scene, scene.query(4), scale=0.125, window=611)


@pytest.mark.parametrize("encoding", [PageEncoding.INT8, PageEncoding.INT4])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_codes_meet_any_number_of_rows(isa, encoding, group):
    scene = Scene(PageLayout(encoding, 2, 96, 80), [(299, 1), (126, 1), (40, 3)], torch.bfloat16)
    query = scene.query(2 * group)
    check(scene, query, scale=0.1)
    check(scene, query, scale=0.1, window=150, softcap=4.0)


@pytest.mark.parametrize("encoding", [PageEncoding.INT8, PageEncoding.INT4])
def test_bf16_queries_lose_next_to_nothing_to_codes(isa, encoding):
    # In f32 outputs, lse would show it: numbers of bf16 are whole multiples of a step.
    scene = Scene(PageLayout(encoding, 2, 128, 128), [(511, 1)], torch.bfloat16)
    query = scene.query(8)
    lse = scene.attend(query, scale=128**-0.5)[1]
    expected = scene.exact(query, scale=128**-0.5)[1]
    torch.testing.assert_close(lse.double(), expected, atol=3e-5, rtol=1e-6)


@pytest.mark.parametrize("encoding", [PageEncoding.INT8, PageEncoding.INT4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_no_number_makes_none(isa, encoding, dtype):
    scene = Scene(PageLayout(encoding, 1, 32, 32), [(20, 1)], dtype)
    for bad in (math.nan, math.inf):
        query = scene.query(2)
        query[0, 1, 5] = bad
        out, lse = scene.attend(query, scale=1.0)
        assert out[0, 0].isfinite().all() and lse[0, 0].isfinite()
        assert out[0, 1].isnan().all() and lse[0, 1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_stay_finite(isa, dtype):
    layout = PageLayout(PageEncoding.of(dtype), 2, 64, 64)
    scene = Scene(layout, [(60, 9), (600, 1)], dtype, spread=100.0)
    out, lse = scene.attend(scene.query(4, spread=100.0), scale=1.0)
    assert out.isfinite().all() and lse.isfinite().all()
    expected, _ = scene.exact(scene.query(4, spread=100.0), scale=1.0)
    assert out.abs().max() <= 1.01 * expected.abs().max() * 4


def test_not_a_number_stays_where_it_is(isa):
    scene = Scene(PageLayout(PageEncoding.F32, 1, 32, 32), [(20, 3)])
    query = scene.query(2)
    query[1, 0] = math.nan
    out, lse = scene.attend(query, scale=1.0)
    bad = torch.zeros(3, 2, dtype=torch.bool)
    bad[1, 0] = True
    assert torch.equal(out.isnan().any(-1), bad) and torch.equal(lse.isnan(), bad)


def test_a_row_with_only_a_sink_gives_zero(isa):
    # No run is without positions, so the scores are made to vanish instead.
    scene = Scene(PageLayout(PageEncoding.F32, 1, 32, 32), [(0, 2)])
    out, lse = scene.attend(scene.query(1), scale=1.0, sinks=torch.tensor([1e4]))
    assert out.eq(0).all() and lse.eq(1e4).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("latent", [False, True])
def test_pages_are_written_as_the_reference_writes_them(isa, encoding, latent):
    layout = PageLayout(encoding, 3, 80, 80 if latent else 45, latent)
    random = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        key, value = (torch.randn(50, 3, dim, generator=random) for dim in (80, 45))
        key[3] = 0
        key[4, 0] = 1e-39
        key[5, 1, 7] = 6e4
        value[2, 1, 40] = -6e4
        if dtype != torch.float16:
            key[6] *= 1e30
        key, value = key.to(dtype), value.to(dtype)
        table = torch.tensor([4, 0, 2, 5])
        # 40 tokens from position 9 in two steps, and one of another sequence.
        steps = [[PagedSegment(1, 13, 9, table)], [PagedSegment(14, 27, 22, table)]]
        steps[0].append(PagedSegment(0, 1, 3, torch.tensor([3])))
        found, expected = (
            Pages(layout, torch.zeros(6, 2, layout.page_bytes, dtype=torch.uint8)) for _ in "ab"
        )
        for step in steps:
            given = (1, AttentionMetadata(step), key, None if latent else value)
            ops.append_pages(found, *given)
            reference.append_pages(expected, *given)
        assert torch.equal(found.memory, expected.memory)


@pytest.mark.parametrize("encoding", [PageEncoding.INT8, PageEncoding.INT4])
def test_codes_are_as_near_as_their_steps(encoding):
    layout = PageLayout(encoding, 2, 64, 48)
    scene = Scene(layout, [(0, 40)])
    key, value = scene.contexts[0]
    held = reference.read_pages(scene.pages, 1, scene.tables[0], 40)
    for number, found in zip((key, value), held, strict=True):
        most = number.abs().amax(-1, keepdim=True)
        steps = {PageEncoding.INT8: 1 / 254, PageEncoding.INT4: 1 / 7.9}[encoding]
        assert ((number - found).abs() <= most * steps).all()


def test_rows_may_lie_apart(isa):
    scene = Scene(PageLayout(PageEncoding.BF16, 2, 32, 32), [(0, 9)], torch.bfloat16)
    packed = torch.randn(9, 8, 32).bfloat16()  # queries, keys and values of a fused product
    query, key, value = packed.split((4, 2, 2), dim=1)
    ops.append_pages(scene.pages, 1, AttentionMetadata(scene.runs), key, value)
    held = reference.read_pages(scene.pages, 1, scene.tables[0], 9)
    assert torch.equal(held[0], key) and torch.equal(held[1], value)
    found = scene.attend(query, scale=0.1)[0]
    assert torch.equal(found, scene.attend(query.contiguous(), scale=0.1)[0])
    across = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(found, scene.attend(across, scale=0.1)[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_neither_threads_nor_neighbours_change_a_bit(isa, two_threads, encoding):
    layout = PageLayout(encoding, 2, 64, 64)
    runs = [(900, 1), (30, 40), (0, 3)]
    scene = Scene(layout, runs, torch.bfloat16)
    query = scene.query(8)
    torch.set_num_threads(1)
    alone = scene.attend(query, scale=0.2)
    torch.set_num_threads(2)
    for _ in range(5):
        together = scene.attend(query, scale=0.2)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    if NATIVE is None:
        return
    for run in scene.runs:
        rows = slice(run.offset, run.offset + run.length)
        single = AttentionMetadata([PagedSegment(0, *run[1:])])
        out, lse = ops.paged_attention(scene.pages, 1, single, query[rows], scale=0.2)
        assert torch.equal(out, alone[0][rows]) and torch.equal(lse, alone[1][rows])


def test_parts_merge_to_the_whole(isa):
    layout = PageLayout(PageEncoding.F32, 2, 32, 32)
    scene = Scene(layout, [(79, 1)])
    query, table = scene.query(4), scene.tables[0]
    sinks = torch.randn(4)
    # Each part is a sequence of its own; the query stands at its end.
    parts = []
    for first, last in ((0, 2), (2, 5)):
        runs = AttentionMetadata(
            [PagedSegment(0, 1, 16 * (last - first) - 1, table[first:last].clone())]
        )
        given = sinks if first == 0 else None
        parts.append(ops.paged_attention(scene.pages, 1, runs, query, scale=0.3, sinks=given))
    merged = ops.merge_attention(parts)
    for found, whole in zip(merged, scene.attend(query, scale=0.3, sinks=sinks), strict=True):
        torch.testing.assert_close(found, whole)


def test_the_reference_is_the_definition():
    for encoding in ENCODINGS:
        scene = Scene(PageLayout(encoding, 2, 32, 24), [(0, 9), (40, 1), (77, 20)])
        query, sinks = scene.query(6), torch.randn(6)
        options = {"scale": 0.2, "window": 33, "softcap": 5.0, "sinks": sinks}
        given = (scene.pages, 1, AttentionMetadata(scene.runs), query)
        out, lse = reference.paged_attention(*given, **options)
        expected, expected_lse = scene.exact(query, **options)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reference.paged_attention_output(*given, **options), out)
        plain = {"scale": 0.2, "window": 33}
        one, _ = reference.paged_attention(*given, **plain)
        torch.testing.assert_close(reference.paged_attention_output(*given, **plain), one)


def test_keys_must_fill_words():
    with pytest.raises(ValueError, match="do not fill words"):
        PageLayout(PageEncoding.INT4, 1, 36, 36)


@pytest.mark.parametrize("encoding", [x for x in ENCODINGS if x is not PageEncoding.INT4])
@pytest.mark.parametrize("latent", [False, True])
def test_plain_rows_hold_what_words_hold(encoding, latent):
    layout = PageLayout(encoding, 2, 24, 24 if latent else 13, latent)
    in_rows = replace(layout, rows=True)
    assert in_rows.page_bytes == layout.page_bytes
    key, value = torch.randn(45, 2, 24), None if latent else torch.randn(45, 2, 13)
    table = torch.tensor([3, 0, 4])
    found = []
    for each in (layout, in_rows):
        memory = torch.full((5, 2, layout.page_bytes), 0xFF, dtype=torch.uint8)
        pages = Pages(each, memory)
        for first, end in ((0, 21), (21, 22), (22, 45)):
            run = PagedSegment(first, end - first, first, table)
            reference.append_pages(pages, 1, AttentionMetadata([run]), key, value)
        assert memory[[1, 2]].eq(0xFF).all() and memory[:, 0].eq(0xFF).all()
        found.append(reference.read_pages(pages, 1, table, 45))
        if each.rows and encoding.bits > 8:
            keys = pages.parts(1)[0]  # [pages, heads, 16, dim]
            assert torch.equal(keys[0, 1, 5], key[21, 1].to(encoding.dtype))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_plain_rows_hold_no_int4():
    with pytest.raises(ValueError, match="no INT4"):
        PageLayout(PageEncoding.INT4, 1, 32, 32, rows=True)
    assert PageLayout(PageEncoding.BF16, 1, 33, 32, rows=True).page_bytes == 2 * 16 * 65


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_parts_of_a_context_merge_to_the_whole(isa, two_threads, encoding, length):
    """Some pages in one call and the others in a second, in any order; other rows stay."""
    scene = Scene(PageLayout(encoding, 2, 32, 32), [(20 * 16 + 3, length), (90, 5)], seed=length)
    run, other = scene.runs
    query = scene.query(4)
    wanted, logs = scene.attend(query, scale=0.2)
    past = run.start // 16
    far = torch.randperm(past, generator=scene.random)[: past // 2]
    near = torch.tensor([i for i in range(len(run.table)) if i not in far.tolist()])
    parts = []
    for table, start, seen in (
        (run.table[near], run.start - 16 * len(far), None),
        (run.table[far], 16 * len(far), 16 * len(far)),
        (run.table[:0], 0, 0),
    ):
        some = AttentionMetadata(
            [PagedSegment(run.offset, length, start, table.contiguous(), seen)]
        )
        out = torch.full((scene.tokens, 4, 32), 7.0)
        lse = torch.full((scene.tokens, 4), 7.0)
        ops.attend_part(scene.pages, scene.layer, some, query, out, lse, scale=0.2)
        rest = slice(other.offset, other.offset + other.length)
        assert (out[rest] == 7).all() and (lse[rest] == 7).all()
        parts.append((out[:length], lse[:length]))
    assert parts[2][1].isneginf().all() and (parts[2][0] == 0).all(), "nothing was seen"
    merged, total = reference.merge_attention(parts)
    near = 1e-5 if encoding.bits > 8 else 2e-3
    torch.testing.assert_close(merged, wanted[:length], rtol=near, atol=near)
    torch.testing.assert_close(total, logs[:length], rtol=near, atol=near)


# Runs that cross 256, 512 and 2048 positions; of windows, some that begin within a page or a chunk.
CROSSINGS = [(250, 13, 0), (240, 30, 100), (509, 4, 300), (2040, 16, 0), (2041, 9, 1030)]
if SANITIZED:
    CROSSINGS = [CROSSINGS[0], CROSSINGS[-1]]


@pytest.mark.skipif(
    NATIVE is None, reason="the reference multiplies matrices as torch divides them"
)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("start", "length", "window"), CROSSINGS)
def test_a_token_is_the_same_alone_and_in_any_run(
    isa, two_threads, encoding, latent, start, length, window
):
    layout = PageLayout(encoding, 1 if latent else 2, 40, 32, latent)
    for dtype in (torch.float32, torch.bfloat16):
        scene = Scene(layout, [(start, length)], dtype, seed=start)
        query, [table] = scene.query(6), scene.tables
        options = {"scale": 0.3, "window": window, "sinks": torch.randn(6)}
        wanted, logs = scene.attend(query, **options)
        # Pages that the query does not see may lie anywhere.
        unseen = max(0, start + 1 - window) // 16 if window else 0
        hidden = torch.cat((torch.full((unseen,), 1 << 40), table[unseen:]))
        for each in (1, 7):
            for first in range(0, length, each):
                rows = slice(first, min(length, first + each))
                run = PagedSegment(0, rows.stop - first, start + first, hidden)
                alone = AttentionMetadata([run])
                out, lse = ops.paged_attention(
                    scene.pages, scene.layer, alone, query[rows], **options
                )
                assert torch.equal(out, wanted[rows]) and torch.equal(lse, logs[rows])
