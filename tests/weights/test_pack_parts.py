"""The parts of a pack, each against a plain model: places, checksums of runs, manifest, journal."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError, DamagedPackError, PackError
from hmt.base.units import GIB
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.encoding import PACKING_VERSION, Encoding
from hmt.quant import Format
from hmt.weights.checksum import RunSums, checksum, pack_sums, sum_at
from hmt.weights.pack.extents import arrange, file_sizes, run_rows
from hmt.weights.pack.journal import Journal
from hmt.weights.pack.manifest import (
    CopiedFile,
    Extent,
    Manifest,
    PackedBlock,
    PackedParam,
    PackedSums,
    decode,
    encode,
)

SIZES = st.lists(st.integers(1, 3 * GIB) | st.integers(1, 100_000), max_size=40)


@given(sizes=SIZES, file_bytes=st.sampled_from([4096, 1 << 20, 4 * GIB]))
def test_extents_follow_each_other_without_crossing_files(sizes: list[int], file_bytes: int):
    places = arrange(sizes, file_bytes)
    assert [place.nbytes >= size for place, size in zip(places, sizes, strict=True)] == [
        True
    ] * len(sizes)
    assert all(p.nbytes % 4096 == p.offset % 4096 == 0 for p in places)
    assert all(p.nbytes < size + 4096 for p, size in zip(places, sizes, strict=True))
    file = end = 0
    for place in places:
        if place.file != file:
            assert place.file == file + 1 and end + place.nbytes > file_bytes
            file, end = place.file, 0
        assert place.offset == end
        end += place.nbytes
        assert end <= file_bytes or place.offset == 0
    totals = file_sizes(places)
    assert sum(totals.values()) == sum(place.nbytes for place in places)
    assert len(totals) == (file + 1 if places else 0)


@given(
    content=st.binary(max_size=300),
    begin=st.integers(0, 300),
    length=st.integers(0, 300),
    run=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 300)),
)
def test_runs_are_summed_alike_however_the_bytes_come(
    content: bytes, begin: int, length: int, run: int, cuts: list[int]
):
    begin = min(begin, len(content))
    end = min(begin + length, len(content))
    sums = RunSums(begin, end, run)
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    for at, stop in pairwise(edges):
        sums.add(at, memoryview(content)[at:stop])
    starts = range(begin, end, run)
    expected = [xxhash.xxh3_64_intdigest(content[at : min(at + run, end)]) for at in starts]
    assert sums.sums == expected
    packed = memoryview(pack_sums(sums.sums))
    assert [sum_at(packed, index) for index in range(len(expected))] == expected


@given(st.integers(1, 20_000))
def test_a_run_is_a_row_or_what_fits_in_a_page(row_bytes: int):
    rows = run_rows(row_bytes)
    assert rows >= 1 and (rows == 1 or rows * row_bytes <= 4096 < (rows + 1) * row_bytes)


FORMATS = (
    Format(Encoding.BF16),
    Format(Encoding.FP8_BLOCK, tile=(128, 64)),
    Format(Encoding.INT8_CHANNEL),
    Format(Encoding.INT4_GROUP, 64, scale_dtype=torch.float16, zeros=True, minima=True),
    Format(Encoding.NVFP4, 16),
)


def some_manifest() -> Manifest:
    params = tuple(
        PackedParam(f"p{n}", f"layers.0.é{n}", (16, 64), (0, 16), FORMATS[0], form, (64 * n, 7))
        for n, form in enumerate(FORMATS)
    )
    attention = PackedBlock(BlockId(0, BlockKind.ATTENTION), Extent(0, 0, 8192, 1), params)
    embedding = PackedBlock(BlockId(TRUNK, BlockKind.EMBEDDING), None, params[:1])
    sums = PackedSums(embedding.id, "weight", 8, Extent(0, 8192, 4096, 2**64 - 1))
    return Manifest(
        packing=PACKING_VERSION,
        scheme="w4a8:64",
        architecture="Test",
        name='a "name"',
        headers=5,
        dtypes=("BF16", "F32"),
        published_bytes=10**12,
        files={"data-00001.hmt": 12288},
        copies={"config.json": CopiedFile(17, 3)},
        blocks=(embedding, attention),
        sums=(sums,),
    )


def test_a_manifest_is_read_as_it_was_written():
    manifest = some_manifest()
    raw = encode(manifest)
    assert decode(raw, Path("m")) == manifest
    assert json.loads(raw)["version"] == 1  # it is plain JSON for everybody else


def test_every_flipped_byte_of_a_manifest_is_found():
    raw = encode(some_manifest())
    for at in range(len(raw)):
        for mask in (1, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[at] ^= mask
            with pytest.raises(PackError, match="the-manifest"):
                decode(bytes(damaged), Path("the-manifest"))


def test_every_truncated_manifest_is_found():
    raw = encode(some_manifest())
    for length in range(len(raw)):
        with pytest.raises(DamagedPackError):
            decode(raw[:length], Path("m"))


def test_another_version_is_told_to_convert_again():
    older = encode(replace(some_manifest(), packing=PACKING_VERSION - 1))
    with pytest.raises(PackError, match=rf"version {PACKING_VERSION - 1}, .*convert .* again"):
        decode(older, Path("m"))
    newer = encode(some_manifest()).replace(b'"version":1', b'"version":2', 1)
    with pytest.raises(PackError, match="format version 2"):
        decode(newer, Path("m"))


@pytest.mark.parametrize("name", ["../data-00001.hmt", "a/b", "..", ""])
def test_a_manifest_cannot_point_outside_of_its_folder(name: str):
    raw = encode(replace(some_manifest(), files={name: 4096}))
    with pytest.raises(PackError, match="not the name of a file"):
        decode(raw, Path("m"))


SEALS = st.dictionaries(st.integers(0, 1000), st.integers(0, 2**64 - 1), max_size=20)


@settings(deadline=None)  # it waits for the disk
@given(batches=st.lists(SEALS, max_size=5), damage=st.tuples(st.integers(0), st.integers(1, 255)))
def test_a_damaged_journal_knows_only_what_is_true(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[dict[int, int]],
    damage: tuple[int, int],
):
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    journal.begin({"scheme": "none"})
    written: dict[int, int] = {}
    for batch in batches:
        journal.add(batch)
        written |= batch
    journal.close()
    whole = path.read_bytes()
    again = Journal(path)
    assert (again.identity, again.seals) == ({"scheme": "none"}, written)
    again.close()
    at, mask = damage[0] % len(whole), damage[1]
    for content in (whole[:at], whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]):
        path.write_bytes(content)
        again = Journal(path)
        assert again.identity in (None, {"scheme": "none"})
        # A number may come twice with another checksum: the earlier one is also a true record.
        records = {(n, seal) for batch in batches for n, seal in batch.items()}
        assert set(again.seals.items()) <= records
        if again.identity is not None:
            again.add({5000: 1})  # goes on where the damage begins
        again.close()
        if again.identity is not None:
            final = Journal(path)
            assert final.seals == again.seals
            final.close()


def test_a_journal_is_locked(tmp_path: Path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(ConfigError, match="another conversion"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def test_checksum_is_xxh3_64():
    # From the reference implementation: XXH3_64bits of the empty text, and of "a".
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(b"a") == 0xE6C632B61E964E1F
