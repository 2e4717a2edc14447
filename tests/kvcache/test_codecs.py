"""Codecs of pages against float64: how far off they are, what they keep exactly, what they take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError
from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.kernels.reference import AttentionMetadata, PagedSegment, Pages, append_pages, read_pages
from hmt.kernels.reference.kv_pages import PageEncoding, PageLayout
from hmt.kvcache.codecs import (
    CODECS,
    Calibration,
    CodecName,
    Int4,
    Int8PerChannel,
    Int8PerToken,
    Int8Static,
    Residual,
    Sparse24,
    Sparse24Int8,
    layer_codecs,
    read_scales,
    static_scales,
)

PAGES, HEADS = 3, 2
# What float32 adds to bounds that are shown in exact numbers: codes up to 127 are quotients, which
# it rounds by 2**-18 there, and the bound is half a code.
EPSILON = 2.0**-16


def rows_of(seed, heads=HEADS, dim=40, pages=PAGES, scale=1.0, outliers=False):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(pages * PAGE_TOKENS, heads, dim, generator=random)
    if outliers:  # channels that are always large, and a token now and then
        rows *= torch.rand(heads, dim, generator=random).pow(-0.5)
        rows[torch.rand(len(rows), generator=random) < 0.05] *= 20
    return rows * scale


def static(heads, dim, rows):
    return Int8Static(heads, dim, static_scales(rows.abs().amax(0)))


def every_codec(heads, dim, rows):
    plain = [make(heads, dim) for make in CODECS.values()] + [static(heads, dim, rows)]
    return [*plain, *(Residual(codec) for codec in plain)]


def round_trip(codec, rows):
    data = codec.encode(rows)
    assert data.dtype == torch.uint8
    assert data.shape == (len(rows) // PAGE_TOKENS // codec.pages, codec.unit_bytes)
    assert data.numel() == codec.nbytes(len(rows))
    return codec.decode(data, torch.float32)


def bound(codec, rows):
    """The largest error of each number, shown in float64: [tokens, heads, dim]."""
    numbers = rows.double().abs()
    if isinstance(codec, Int8PerToken):
        return numbers.amax(-1, keepdim=True) / 127 / 2
    if isinstance(codec, Int8PerChannel):  # its scale is rounded to 8 bits
        by_page = numbers.unflatten(0, (-1, PAGE_TOKENS)).amax(1, keepdim=True)
        return (by_page / 127 / 2 * (1 + 2.0**-8)).expand(-1, PAGE_TOKENS, -1, -1).flatten(0, 1)
    if isinstance(codec, Int8Static):
        scales = codec.scales.double()
        return torch.maximum(scales / 2, numbers - 127 * scales)
    if isinstance(codec, Int4):  # the number opposite to the furthest may be cut off by a step
        groups = torch.nn.functional.pad(numbers, (0, -rows.shape[-1] % 32)).unflatten(-1, (-1, 32))
        largest = groups.amax(-1).repeat_interleave(32, -1)[..., : rows.shape[-1]]
        return largest / 8 * (1 + 2.0**-5)
    # Of four numbers two are kept: what is not is no larger than the second of them.
    fours = torch.nn.functional.pad(numbers, (0, -rows.shape[-1] % 4)).unflatten(-1, (-1, 4))
    second = fours.sort(-1).values[..., 2:3].expand_as(fours).flatten(-2)[..., : rows.shape[-1]]
    if isinstance(codec, Sparse24Int8):
        return torch.maximum(second, numbers.amax(-1, keepdim=True) / 127 / 2)
    return torch.maximum(second, numbers * 2.0**-8)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 2, 7, 16, 32, 40, 65]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    outliers=st.booleans(),
)
def test_no_number_is_further_off_than_its_codec_allows(seed, heads, dim, scale, outliers):
    rows = rows_of(seed, heads, dim, scale=scale, outliers=outliers)
    for codec in every_codec(heads, dim, rows):
        found = round_trip(codec, rows)
        assert found.isfinite().all()
        if not isinstance(codec, Residual):
            error = (found.double() - rows.double()).abs()
            allowed = bound(codec, rows) * (1 + EPSILON) + rows.abs().amax() * 2.0**-60
            assert (error <= allowed).all(), type(codec)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_a_residual_helps_outliers_and_harms_nobody(seed, scale):
    rows = rows_of(seed, 4, 64, scale=scale)
    at = seed % PAGE_TOKENS
    rows[at, seed % 4, :3] *= 50  # one row whose scale is far larger than its neighbours'
    for base in (Int8PerToken(4, 64), Int4(4, 64)):
        codec = Residual(base)
        before = (round_trip(base, rows).double() - rows.double()).abs()
        after = (round_trip(codec, rows).double() - rows.double()).abs()
        parts = [error.unflatten(-1, (codec.parts, -1)) for error in (before, after)]
        helped = (parts[0] != parts[1]).any(-1)
        by_page = helped.flatten(1).unflatten(0, (-1, PAGE_TOKENS)).flatten(1)
        assert (by_page.sum(1) <= codec.records).all()
        assert helped[at, seed % 4].any()
        worst = parts[0].amax(-1)
        # Codes reach to 7, and their scale is at most twice as large as it has to be.
        assert (parts[1].amax(-1)[helped] <= worst[helped] / 7 * 1.01).all()
        assert torch.equal(parts[0][~helped], parts[1][~helped])


def test_a_residual_goes_to_what_is_3_sigma_off_its_neighbours():
    scales = torch.full((1, 16), 0.01)
    rows = torch.zeros(PAGE_TOKENS, 1, 16)
    rows[:, 0, 0] = 0.002  # lost by all
    rows[5, 0, 0] = 0.0049  # 2.45 times as much
    codec = Residual(Int8Static(1, 16, scales))
    assert torch.equal(round_trip(codec, rows), torch.zeros_like(rows))
    rows[:, 0, 0] = 0.0012
    rows[5, 0, 0] = 0.0049  # 4.1 times
    found = round_trip(codec, rows)
    assert found[5, 0, 0] == pytest.approx(0.0049, rel=0.1)
    assert (found[torch.arange(16) != 5] == 0).all()


def test_what_a_static_range_cuts_off_comes_back_with_a_residual():
    rows = rows_of(3, 2, 64, pages=1)
    codec = static(2, 64, rows)
    part = rows[7, 1, 16:32]
    part *= 9
    cut, kept = (round_trip(c, rows)[7, 1, 16:32] for c in (codec, Residual(codec)))
    assert (cut - part).norm() > 6 * (kept - part).norm()


def test_pages_that_share_records_give_them_to_those_that_need_them():
    rows = rows_of(4, 2, 64, pages=32)
    codec = static(2, 64, rows)
    rows[40:46, :, 5] = 30  # in a row, in one page of the first unit
    shared = Residual(codec, pages=16)
    assert shared.unit_bytes <= 16 * codec.unit_bytes * 1.005
    assert shared.nbytes(len(rows)) == 2 * shared.unit_bytes
    alone, together = (round_trip(c, rows) for c in (Residual(codec), shared))
    wrong = [((found - rows).abs().amax(-1) > 3).sum() for found in (alone, together)]
    assert wrong == [11, 0]
    assert torch.equal(together[256:], codec.decode(codec.encode(rows[256:]), torch.float32))


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 128), (1, 160)])
def test_residuals_of_parts_take_less_than_half_a_percent(heads, dim):
    for make in (Int8PerToken, Int8PerChannel):
        base = make(heads, dim)
        extra = Residual(base).unit_bytes / base.unit_bytes - 1
        assert 0 < extra < 0.005


@given(seed=st.integers(0, 10**6), power=st.integers(-20, 20))
@settings(max_examples=8, deadline=None)
def test_numbers_that_can_be_represented_stay_exact(seed, power):
    random = torch.Generator().manual_seed(seed)
    shape = 2 * PAGE_TOKENS, HEADS, 64
    eights = torch.randint(-127, 128, shape, generator=random).float()
    eights[..., 0] = 127
    eights[::PAGE_TOKENS] = 127
    eights *= 2.0**power
    fours = torch.randint(-7, 8, shape, generator=random).float()
    fours[..., ::32] = -8
    fours *= 2.0**power
    pairs = eights.unflatten(-1, (-1, 4)).clone()
    pairs[..., 1] = pairs[..., 2] = 0
    for codec, rows in (
        (Int8PerToken(HEADS, 64), eights),
        (Int8PerChannel(HEADS, 64), eights),
        (static(HEADS, 64, eights), eights),
        (Int4(HEADS, 64), fours),
        (Sparse24(HEADS, 64), pairs.flatten(-2)),
        (Sparse24Int8(HEADS, 64), pairs.flatten(-2)),
    ):
        for each in (codec, Residual(codec)):
            assert torch.equal(round_trip(each, rows), rows)


@pytest.mark.parametrize("dim", [5, 64])
def test_zeros_stay_zeros(dim):
    rows = rows_of(1, dim=dim)
    rows[3] = 0
    rows[PAGE_TOKENS : 2 * PAGE_TOKENS] = 0
    rows[..., 1] = 0
    for codec in every_codec(HEADS, dim, rows):
        found = round_trip(codec, rows)
        assert (found[rows == 0] == 0).all()
        nothing = codec.decode(torch.zeros(2, codec.unit_bytes, dtype=torch.uint8), torch.float32)
        if not isinstance(getattr(codec, "base", codec), Int4):  # whose code of 0 is 8
            assert (nothing == 0).all()
        assert nothing.isfinite().all()


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_pages_do_not_depend_on_their_neighbours(seed):
    rows = rows_of(seed, outliers=True)
    order = torch.tensor([2, 0, 1])
    mixed = rows.unflatten(0, (PAGES, -1))[order].flatten(0, 1)
    for codec in every_codec(HEADS, 40, rows):
        data = codec.encode(rows)
        assert torch.equal(codec.encode(mixed), data[order])
        for page in range(PAGES):
            tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            assert torch.equal(codec.encode(rows[tokens]), data[page : page + 1])
            alone = codec.decode(data[page : page + 1], torch.float32)
            assert torch.equal(alone, codec.decode(data, torch.float32)[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_and_int4_hold_the_numbers_of_pages(dtype):
    rows = rows_of(9, 2, 64, outliers=True).to(dtype)
    for encoding, codec in (
        (PageEncoding.INT8, Int8PerToken(2, 64)),
        (PageEncoding.INT4, Int4(2, 64)),
    ):
        layout = PageLayout(encoding, 2, 64, 64)
        pages = Pages(layout, torch.zeros(PAGES, 1, layout.page_bytes, dtype=torch.uint8))
        table = torch.arange(PAGES)
        append_pages(
            pages, 0, AttentionMetadata([PagedSegment(0, len(rows), 0, table)]), rows, rows
        )
        key, value = read_pages(pages, 0, table, len(rows))
        found = codec.decode(codec.encode(rows), torch.float32)
        assert torch.equal(found, key) and torch.equal(found, value)
        assert 2 * codec.unit_bytes == layout.page_bytes


@given(seed=st.integers(0, 10**6), dim=st.sampled_from([4, 8, 12, 64]))
@settings(max_examples=8, deadline=None)
def test_of_four_numbers_the_two_largest_are_kept(seed, dim):
    rows = rows_of(seed, dim=dim).bfloat16().float()
    found = round_trip(Sparse24(HEADS, dim), rows).unflatten(-1, (-1, 4))
    fours = rows.unflatten(-1, (-1, 4))
    assert ((found == fours) | (found == 0)).all()
    kept = (found * fours).sum(-1).double()
    best = fours.double().square().sort(-1).values[..., 2:].sum(-1)
    assert torch.allclose(kept, best)


def test_scales_come_from_what_was_seen(tmp_path):
    layers = {
        0: KVLayer(KVKind.FULL, 2, 8, 4),
        3: KVLayer(KVKind.LATENT, 1, 12, 8),
    }
    calibration = Calibration()
    keys, values, latent = rows_of(1, 2, 8), rows_of(2, 2, 4), rows_of(3, 1, 12)
    keys[..., 5] = 0
    for part in range(PAGES):
        tokens = slice(part * PAGE_TOKENS, (part + 1) * PAGE_TOKENS)
        calibration.see(0, keys[tokens], values[tokens])
        calibration.see(3, latent[tokens], None)
    calibration.write(tmp_path / "scales.safetensors")
    codecs = layer_codecs(f"INT8-static@{tmp_path}/scales.safetensors", layers)
    for codec, key, value in ((codecs[0], keys, values), (codecs[3], latent, None)):
        data = codec.encode(key, value)
        assert data.shape == (PAGES, codec.unit_bytes)
        key_found, value_found = codec.decode(data, torch.float32)
        assert torch.equal(key_found, round_trip(static(*key.shape[1:], key), key))
        wanted = key_found[..., :8] if value is None else round_trip(static(2, 4, value), value)
        assert torch.equal(value_found, wanted)
    other = {0: KVLayer(KVKind.FULL, 2, 16, 4)}
    with pytest.raises(ConfigError, match=r"shape \(2, 8\) for 0.key, and the model needs \(2, 16"):
        read_scales(tmp_path / "scales.safetensors", other)
    with pytest.raises(ConfigError, match="does not hold scales"):
        read_scales(tmp_path / "nothing.safetensors", layers)


def test_names_say_what_becomes_of_keys_and_values():
    [codec] = layer_codecs("int8-channel/sparse24-int8+parts", {0: LAYER}).values()
    assert type(codec.keys.base) is Int8PerChannel and type(codec.values.base) is Sparse24Int8
    assert codec.keys.width == codec.values.width == 16
    key, value = rows_of(1, 2, 64), rows_of(2, 2, 32)
    for found, wanted, part in zip(
        codec.decode(codec.encode(key, value), torch.bfloat16),
        (key, value),
        (codec.keys, codec.values),
        strict=True,
    ):
        assert torch.equal(found, part.decode(part.encode(wanted), torch.bfloat16))
    assert CodecName.parse("Int4").values == "int4"


LAYER = KVLayer(KVKind.FULL, 2, 64, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int9", "choose int8, "),
        ("int8/fp8", "choose int8, "),
        ("int8/", "after"),
        ("int8+", "after"),
        ("int8+more", "parts or shared-parts"),
        ("int8+many-parts", "parts or shared-parts"),
        ("int8@scales", "only int8-static takes a file"),
        ("", "choose int8, "),
    ],
)
def test_names_that_are_none_are_told_what_would_be(name, message):
    with pytest.raises(ConfigError, match=message):
        CodecName.parse(name)


def test_static_scales_come_from_a_file():
    assert CodecName.parse("int8-static/int4").lacks_file
    assert not CodecName.parse("int8-static@a/b@c").lacks_file
    with pytest.raises(ConfigError, match="needs a file with scales"):
        layer_codecs("int8-static", {0: LAYER})


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bytes():
    rows = rows_of(5, 4, 64, outliers=True)
    for codec in every_codec(4, 64, rows):
        data = codec.encode(rows.cuda())
        found = codec.decode(data, torch.float32).cpu()
        wanted = codec.decode(codec.encode(rows), torch.float32)
        # A quotient that lies between two codes may go to either.
        assert ((found - wanted).abs() <= 2.5 * bound(getattr(codec, "base", codec), rows)).all()
        assert (found != wanted).float().mean() < 0.01
