"""Triton's attention over pages against its definition in float64."""

import math
from dataclasses import replace

import pytest
import torch

from hmt.kernels import reference
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

attention = pytest.importorskip("hmt.kernels.triton.attention.paged")
device_tables = pytest.importorskip("hmt.kernels.triton.attention.metadata")

ENCODINGS = [x for x in PageEncoding if x is not PageEncoding.INT4]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU


class Scene:
    """Pages of two layers in shuffled order, filled up to each run's end by the reference."""

    def __init__(self, device, layout, runs, dtype=torch.float32, seed=0, spread=1.0):
        random = torch.Generator().manual_seed(seed)
        layout = replace(layout, rows=layout.encoding is not PageEncoding.INT4)
        self.device, self.layout, self.dtype, self.random = device, layout, dtype, random
        counts = [-(-(start + length) // 16) for start, length in runs]
        order = torch.randperm(sum(counts) + 2, generator=random)
        # What was not written is not a number: it may be read, but has no influence.
        memory = torch.full((len(order), 2, layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.pages = Pages(layout, memory)
        self.tables = list(order[: sum(counts)].split(counts))
        offsets = [sum(length for _, length in runs[:i]) for i in range(len(runs))]
        self.runs = [
            PagedSegment(offset, length, start, table)
            for offset, (start, length), table in zip(offsets, runs, self.tables, strict=True)
        ]
        self.tokens = sum(length for _, length in runs)
        for run in self.runs:
            end = run.start + run.length
            key, value = (
                (torch.randn(end, layout.heads, dim, generator=random) * spread).to(dtype)
                for dim in (layout.key_dim, layout.value_dim)
            )
            whole = AttentionMetadata([PagedSegment(0, end, 0, run.table)])
            reference.append_pages(self.pages, 1, whole, key, None if layout.latent else value)
        self.on_device = Pages(layout, memory.to(device))

    def query(self, heads, dtype=None, spread=1.0):
        shape = (self.tokens, heads, self.layout.key_dim)
        return (torch.randn(shape, generator=self.random) * spread).to(dtype or self.dtype)

    def attend(self, query, runs=None, **options):
        runs = runs or AttentionMetadata(self.runs)
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].to(self.device)
        found = attention.paged_attention(self.on_device, 1, runs, query.to(self.device), **options)
        return tuple(x.cpu() for x in found)

    def exact(self, query, **options):
        parts = []
        for run in self.runs:
            held = reference.read_pages(self.pages, 1, run.table, run.start + run.length)
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
    torch.testing.assert_close(out.double(), expected, atol=near * scale, rtol=near)
    torch.testing.assert_close(lse.double(), expected_lse, atol=3e-4, rtol=3e-5)


RUNS = {
    "one": [(0, 1)],
    "decode": [(330, 1), (15, 1), (16, 1), (0, 1)],
    "several tokens": [(300, 3), (61, 5)],
    "prompt": [(0, 40)],
    "mixed": [(270, 21), (63, 1), (0, 33), (200, 2)],
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_its_definition(device, runs, dtype):
    scene = Scene(device, PageLayout(PageEncoding.of(dtype), 2, 32, 32), runs, dtype)
    check(scene, scene.query(6), scale=0.2)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_types(device, encoding, dtype):
    scene = Scene(device, PageLayout(encoding, 2, 32, 48), [(70, 1), (20, 9)], dtype)
    check(scene, scene.query(4), scale=0.2)


@pytest.mark.parametrize("encoding", [PageEncoding.INT8, PageEncoding.FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_one_byte(device, encoding, dtype):
    """Values so wide that the tensor cores take them as words."""
    scene = Scene(device, PageLayout(encoding, 2, 48, 64), [(330, 1), (15, 1), (61, 5)], dtype)
    check(scene, scene.query(6), scale=0.2)


@pytest.mark.parametrize("window", [1, 16, 33, 300])
def test_windows(device, window):
    runs = [(600, 1), (290, 12), (5, 2)]
    scene = Scene(device, PageLayout(PageEncoding.F32, 1, 16, 16), runs)
    check(scene, scene.query(2), scale=0.3, window=window)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("runs", [RUNS["decode"], RUNS["prompt"]], ids=["decode", "prompt"])
def test_sinks_and_bounded_scores(device, sinks, runs):
    scene = Scene(device, PageLayout(PageEncoding.F16, 1, 16, 16), runs, torch.float16)
    given = torch.tensor([0.5, -math.inf, 3.0, 20.0]) if sinks else None
    check(scene, scene.query(4), scale=0.5, softcap=4.0, sinks=given)
    check(scene, scene.query(4), scale=0.5, sinks=given)


@pytest.mark.parametrize(
    "shape", [(4, 4, 24, 24), (5, 1, 80, 40), (3, 1, 40, 80), (2, 1, 192, 128), (7, 1, 128, 128)]
)
def test_odd_shapes(device, shape):
    q_heads, heads, *dims = shape
    dtype = torch.float16
    scene = Scene(device, PageLayout(PageEncoding.F16, heads, *dims), [(21, 1), (30, 11)], dtype)
    check(scene, scene.query(q_heads), scale=dims[0] ** -0.5)


@pytest.mark.skipif(not ON_GPU, reason="Gluon has no interpreter")
@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [
        (torch.bfloat16, PageEncoding.BF16),
        (torch.float16, PageEncoding.F16),
        (torch.bfloat16, PageEncoding.FP8),
    ],
)
@pytest.mark.parametrize(
    "runs",
    [[(1000, 1), (63, 1), (0, 1), (5000, 1)], [(300, 3), (0, 8), (1, 2)], [(900, 40), (0, 70)]],
)
def test_latents_of_128_heads(device, dtype, encoding, runs):
    layout = PageLayout(encoding, 1, 576, 512, latent=True)
    scene = Scene(device, layout, runs, dtype)
    for heads in (128, 64, 80):
        check(scene, scene.query(heads), scale=576**-0.5)


@pytest.mark.parametrize("dims", [(40, 32), (24, 8), (48, 40), (576, 512)])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_latent_values_are_the_beginning_of_keys(device, dims, encoding):
    dtype = encoding.dtype if encoding.bits > 8 else torch.float32
    if dtype == torch.bfloat16 and not ON_GPU:
        dtype = torch.float32
    layout = PageLayout(encoding, 1, *dims, latent=True)
    scene = Scene(device, layout, [(40, 1), (67, 3)], dtype)
    check(scene, scene.query(5), scale=dims[0] ** -0.5)


def test_huge_scores_stay_finite(device):
    layout = PageLayout(PageEncoding.F16, 1, 32, 32)
    scene = Scene(device, layout, [(60, 9), (300, 1)], torch.float16, spread=100.0)
    query = scene.query(2, spread=100.0)
    for softcap in (0.0, 30.0):
        out, lse = scene.attend(query, scale=1.0, softcap=softcap)
        assert out.isfinite().all() and lse.isfinite().all()
    expected, _ = scene.exact(query, scale=1.0)
    assert out.abs().max() <= 4 * expected.abs().max()


def test_not_a_number_stays_where_it_is(device):
    scene = Scene(device, PageLayout(PageEncoding.F32, 1, 16, 16), [(20, 3)])
    query = scene.query(2)
    query[1, 0] = math.nan
    out, lse = scene.attend(query, scale=1.0)
    bad = torch.zeros(3, 2, dtype=torch.bool)
    bad[1, 0] = True
    assert torch.equal(out.isnan().any(-1), bad) and torch.equal(lse.isnan(), bad)


def test_a_row_with_only_a_sink_gives_zero(device):
    scene = Scene(device, PageLayout(PageEncoding.F32, 1, 16, 16), [(0, 2), (0, 12)])
    out, lse = scene.attend(scene.query(1), scale=1.0, sinks=torch.tensor([1e4]))
    assert out.eq(0).all() and lse.eq(1e4).all()


def test_rows_may_lie_apart(device):
    scene = Scene(device, PageLayout(PageEncoding.F16, 2, 32, 32), [(0, 9)], torch.float16)
    packed = torch.randn(9, 8, 32, generator=scene.random).half()
    query = packed[:, :4]
    found = scene.attend(query.contiguous(), scale=0.1)[0]
    apart = packed.to(device)[:, :4]
    runs = AttentionMetadata(scene.runs)
    out = attention.paged_attention_output(scene.on_device, 1, runs, apart, scale=0.1)
    assert torch.equal(out.cpu(), found)
    across = apart.transpose(1, 2).contiguous().transpose(1, 2)
    out = attention.paged_attention_output(scene.on_device, 1, runs, across, scale=0.1)
    assert torch.equal(out.cpu(), found)


def test_neighbours_change_no_bit_of_a_run(device):
    runs = [(400, 1), (130, 1), (0, 1)]
    scene = Scene(device, PageLayout(PageEncoding.F16, 1, 32, 32), runs, torch.float16)
    query = scene.query(4)
    together = scene.attend(query, scale=0.2)
    for run in scene.runs:  # alone, in a launch that has room for as many
        fixed = device_tables.fixed_runs(device, len(runs), 1, 1024)
        device_tables.update_runs(fixed, [PagedSegment(0, *run[1:])])
        rows = slice(run.offset, run.offset + 1)
        alone = scene.attend(query[rows], fixed, scale=0.2)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("runs", [[(30, 1), (7, 12)], [(0, 20), (30, 1), (0, 9), (7, 12), (0, 3)]])
def test_append_and_attend_in_one_call(device, runs):
    layout, dtype = PageLayout(PageEncoding.F16, 2, 32, 32), torch.float16
    scene = Scene(device, layout, runs, dtype)
    heads = torch.randn(scene.tokens, 8, 32, generator=scene.random).to(dtype)
    expected = reference.append_attend_pages(
        scene.pages, 1, AttentionMetadata(scene.runs), heads, scale=0.2
    )
    found = attention.append_attend_pages(
        scene.on_device, 1, AttentionMetadata(scene.runs), heads.to(device), scale=0.2
    )
    torch.testing.assert_close(found.cpu(), expected, atol=3e-3, rtol=3e-3)
    assert torch.equal(scene.on_device.memory.cpu()[:, 0], scene.pages.memory[:, 0])
    for run in scene.runs:
        held = reference.read_pages(scene.pages, 1, run.table, run.start + run.length)
        on_device = Pages(scene.layout, scene.on_device.memory.cpu())
        also = reference.read_pages(on_device, 1, run.table, run.start + run.length)
        assert all(torch.equal(a, b) for a, b in zip(held, also, strict=True))


def test_int4_pages_go_to_the_reference(device):
    layout = PageLayout(PageEncoding.INT4, 1, 32, 32)
    scene = Scene(device, layout, [(20, 3)])
    scene.runs = [PagedSegment(*run[:3], run.table.to(device)) for run in scene.runs]
    out, _ = scene.attend(query := scene.query(2), scale=0.2)
    scene.runs = [PagedSegment(*run[:3], run.table.cpu()) for run in scene.runs]
    torch.testing.assert_close(out.double(), scene.exact(query, scale=0.2)[0], atol=1e-4, rtol=1e-4)


def test_fixed_runs_are_updated_in_place(device):
    runs = [(100, 1), (20, 2), (255, 1)]
    scene = Scene(device, PageLayout(PageEncoding.F32, 1, 16, 16), runs)
    query = scene.query(2)
    fixed = device_tables.fixed_runs(device, count=4, tokens=2, context=256)
    out, lse = scene.attend(query, fixed, scale=0.2)  # of nothing: nothing is written
    expected, expected_lse = scene.exact(query, scale=0.2)
    for chosen in (scene.runs, scene.runs[1:], scene.runs[:1]):
        device_tables.update_runs(fixed, chosen)
        out, lse = scene.attend(query, fixed, scale=0.2)
        for run in chosen:
            rows = slice(run.offset, run.offset + run.length)
            torch.testing.assert_close(out[rows].double(), expected[rows], atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[rows].double(), expected_lse[rows], atol=3e-4, rtol=3e-5)


@pytest.mark.parametrize(
    ("encoding", "window"),
    [(PageEncoding.F32, 0), (PageEncoding.F16, 90)] + [(PageEncoding.BF16, 0)] * ON_GPU,
)
def test_bits_do_not_depend_on_how_long_a_context_may_become(device, encoding, window):
    dtype = encoding.dtype
    runs = [(150, 1), (63, 1), (70, 9), (90, 3)]
    if ON_GPU:
        runs += [(5000, 1), (3000, 1), (1030, 1), (64, 1), (4000, 7), (1500, 40), (1, 30), (0, 1)]
    scene = Scene(device, PageLayout(encoding, 1, 32, 32), runs, dtype)
    query = scene.query(4)
    expected = scene.attend(query, scale=0.2, window=window)
    lengths = [run.length for run in scene.runs]
    for run in scene.runs:
        rows = slice(run.offset, run.offset + run.length)
        for bucket in (256, 1024, 8192)[: 3 if ON_GPU else 2]:
            if bucket < run.start + run.length:
                continue
            fixed = device_tables.fixed_runs(device, lengths.count(run.length), run.length, bucket)
            device_tables.update_runs(fixed, [PagedSegment(0, *run[1:])])
            found = scene.attend(query[rows], fixed, scale=0.2, window=window)
            assert all(torch.equal(a, b[rows]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("latent", [False, True])
def test_parts_meet(device, latent):
    layout = PageLayout(PageEncoding.F16, 1, 48, 32, latent)
    runs = [(300, 1), (150, 3), (10, 2)]  # the interpreter is slow
    if ON_GPU:
        runs += [(5000, 1), (4090, 1), (1500, 3), (120, 2)]
    scene = Scene(device, layout, runs, torch.float16)
    for count in (2, 20):
        check(scene, scene.query(count), scale=0.2)
        check(scene, scene.query(count), scale=0.2, sinks=torch.linspace(-3, 6, count))


@pytest.mark.parametrize("dim", [32, 24])
def test_new_tokens_are_not_read_from_pages(device, dim):
    runs = [(130, 1), (61, 8), (0, 1), (14, 4)]
    scene = Scene(device, PageLayout(PageEncoding.F16, 2, dim, dim), runs, torch.float16)
    heads = torch.randn(scene.tokens, 8, dim, generator=scene.random).half()
    for options in ({}, {"window": 40}, {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])}):
        memory = scene.pages.memory.clone()
        for run in scene.runs:  # what a program read of these would show
            for position in range(run.start, run.start + run.length):
                page = Pages(scene.layout, memory[run.table[position // 16]][None])
                for part in page.parts(1)[:2]:
                    part[:, :, position % 16] = math.nan
        scene.on_device = Pages(scene.layout, memory.to(device))
        expected = reference.append_attend_pages(
            scene.pages, 1, AttentionMetadata(scene.runs), heads, scale=0.2, **options
        )
        there = {name: x.to(device) if name == "sinks" else x for name, x in options.items()}
        found = attention.append_attend_pages(
            scene.on_device, 1, AttentionMetadata(scene.runs), heads.to(device), scale=0.2, **there
        )
        torch.testing.assert_close(found.cpu(), expected, atol=3e-3, rtol=3e-3)
        assert torch.equal(scene.on_device.memory.cpu()[:, 1], scene.pages.memory[:, 1])


@pytest.mark.skipif(not ON_GPU, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("window", [0, 300])
def test_a_captured_step_goes_on_as_contexts_grow(device, window):
    layout, dtype = PageLayout(PageEncoding.BF16, 2, 64, 64), torch.bfloat16
    starts = [3, 250, 1015, 2000]
    scene = Scene(device, layout, [(start + 50, 1) for start in starts], dtype)
    fixed = device_tables.fixed_runs(device, count=6, tokens=1, context=4096)
    heads = torch.zeros(4, 12, 64, dtype=dtype, device=device)  # 8 for queries
    options = {"scale": 0.125, "window": window}

    def step():
        return attention.append_attend_pages(scene.on_device, 1, fixed, heads, **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for moved in range(40):
        given = torch.randn(4, 12, 64, generator=scene.random).to(dtype)
        chosen = [
            PagedSegment(i, 1, start + moved, scene.tables[i]) for i, start in enumerate(starts)
        ][: 4 - moved % 2]
        heads.copy_(given)
        device_tables.update_runs(fixed, chosen)
        captured.fill_(math.nan)
        graph.replay()
        count = len(chosen)
        expected = reference.append_attend_pages(
            scene.pages, 1, AttentionMetadata(chosen), given[:count], **options
        )
        found = captured[:count].float().cpu()
        torch.testing.assert_close(found, expected.float(), atol=2e-2, rtol=2e-2)
