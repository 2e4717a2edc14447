"""A pack: its bytes, the store over it, and damage that is found before it is used."""

import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from doubles import (
    EXPERTS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    block_specs,
    model_spec,
    open_store,
    target,
    write_checkpoint,
    write_pack,
)

from hmt.base.errors import DamagedPackError, MissingFileError, PackError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.store import Verify
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import verify
from hmt.formats import open_checkpoint
from hmt.weights import bind, lay_out
from hmt.weights.pack import open_pack, read_manifest

EMBEDDING = BlockId(TRUNK, BlockKind.EMBEDDING)
HEADS = [block.id for block in block_specs() if block.id.kind is BlockKind.HEAD]
LEASABLE = [block.id for block in block_specs() if block.id != EMBEDDING]
SCHEMES = ("none", "w8a8", "w4a8", "nvfp4a16")
DATA = "data-00001.hmt"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tied: bool) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tied=tied)
    return folder


@pytest.fixture(scope="module")
def packs(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tied: bool
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packs")
    for scheme in SCHEMES:
        write_pack(checkpoint, folder / scheme, scheme=scheme, tied=tied)
    return {scheme: folder / scheme for scheme in SCHEMES}


@pytest.fixture
def pack(packs: dict[str, Path], tmp_path: Path) -> Path:
    """One that may be damaged."""
    return Path(shutil.copytree(packs["none"], tmp_path / "pack"))


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


def test_an_unconverted_pack_holds_the_published_bytes_and_zeros(
    packs: dict[str, Path], checkpoint: Path, tied: bool
) -> None:
    records = open_checkpoint(checkpoint).records
    manifest = read_manifest(packs["none"])
    content = (packs["none"] / DATA).read_bytes()
    covered = bytearray(len(content))
    for block in manifest.blocks:
        if block.extent is None:
            assert tied and block.id == EMBEDDING
            continue
        for param in block.params:
            record = records[param.source]
            raw = record.file.read_bytes()[record.offset : record.offset + record.nbytes]
            if param.rows is not None:
                row = len(raw) // record.shape[0]
                raw = raw[param.rows[0] * row : param.rows[1] * row]
            begin = block.extent.offset + param.at[0]
            assert begin % 64 == 0 and content[begin : begin + len(raw)] == raw
            covered[begin : begin + len(raw)] = b"\1" * len(raw)
    for sums in manifest.sums:
        begin = sums.extent.offset
        covered[begin : begin + sums.extent.nbytes] = b"\1" * sums.extent.nbytes
    assert not any(byte for byte, known in zip(content, covered, strict=True) if not known)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_extents_cover_the_files_and_have_their_checksums(
    packs: dict[str, Path], scheme: str
) -> None:
    manifest = read_manifest(packs[scheme])
    content, end = (packs[scheme] / DATA).read_bytes(), 0
    for _, extent in manifest.extents():
        assert (extent.file, extent.offset) == (0, end) and end % 4096 == 0
        end += extent.nbytes
        assert xxhash.xxh3_64_intdigest(content[extent.offset : end]) == extent.seal
    assert end == len(content) == manifest.data_bytes


def test_blocks_lie_in_order_of_use_and_experts_side_by_side(packs: dict[str, Path]) -> None:
    manifest = read_manifest(packs["w4a8"])
    blocks = [block for block in manifest.blocks if block.extent is not None]
    assert [b.id for b in manifest.blocks] == [spec.id for spec in block_specs()]
    offsets = [block.extent.offset for block in blocks if block.extent]
    assert offsets == sorted(offsets)
    for layer in range(LAYERS):
        experts = [b.extent for b in blocks if b.id[:2] == (layer, BlockKind.EXPERT) and b.extent]
        assert len(experts) == EXPERTS
        for one, next_one in pairwise(experts):
            assert one.offset + one.nbytes == next_one.offset


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_checkpoints_make_equal_packs(
    packs: dict[str, Path], checkpoint: Path, tied: bool, tmp_path: Path, scheme: str, pairs: int
) -> None:
    write_pack(checkpoint, tmp_path / "again", scheme=scheme, tied=tied, pairs=pairs)
    assert_equal_folders(tmp_path / "again", packs[scheme])


def assert_equal_folders(one: Path, other: Path) -> None:
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_over_a_pack_leases_what_one_over_the_checkpoint_does(
    packs: dict[str, Path], checkpoint: Path, tied: bool, scheme: str, resident: float
) -> None:
    chosen = set(random.Random(3).sample(LEASABLE, int(resident * len(LEASABLE))))
    options = {"slots_bytes": 1 << 17, "resident": chosen.__contains__, "tied": tied}
    ours = open_store(packs[scheme], scheme=scheme, verify=Verify.ALWAYS, **options)
    theirs = open_store(checkpoint, scheme=scheme, **options)
    ours.store.load_residents()
    theirs.store.load_residents()
    for block in LEASABLE * 2:
        with ours.store.lease(block) as mine, theirs.store.lease(block) as expected:
            assert list(mine) == list(expected)
            for name, weight in expected.items():
                for part in ("data", "scales", "zeros", "minima", "factor"):
                    wanted, found = getattr(weight, part), getattr(mine[name], part)
                    assert (found is None) == (wanted is None)
                    if wanted is not None:
                        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    ids = torch.randint(VOCABULARY, (50,), generator=torch.Generator().manual_seed(1))
    expected_rows = theirs.store.rows(EMBEDDING, "weight", ids)
    assert torch.equal(ours.store.rows(EMBEDDING, "weight", ids), expected_rows)
    assert not any(layout.staging_bytes for layout in ours.layouts.values())
    ours.close()
    theirs.close()


def test_activations_change_no_byte(packs: dict[str, Path], tied: bool) -> None:
    open_pack(packs["w4a8"]).layouts(model_spec(tied), target("w4a16"))


def test_every_flipped_page_is_found_named_and_harms_no_other(
    pack: Path, packs: dict[str, Path], tied: bool
) -> None:
    manifest = read_manifest(pack)
    whole = (pack / DATA).read_bytes()
    chance = random.Random(0)
    for block in manifest.blocks:
        if block.extent is None or block.id == EMBEDDING:
            continue
        for page in range(block.extent.offset, block.extent.offset + block.extent.nbytes, 4096):
            damaged = bytearray(whole)
            damaged[page + chance.randrange(4096)] ^= 1 << chance.randrange(8)
            (pack / DATA).write_bytes(damaged)
            bench = open_store(pack, slots_bytes=1 << 17, tied=tied)
            with pytest.raises(DamagedPackError) as raised, bench.store.lease(block.id):
                pass
            said = str(raised.value)
            assert str(pack / DATA) in said and str(block.id) in said
            assert f"offset {block.extent.offset}," in said
            other = chance.choice([b for b in LEASABLE if b != block.id])
            with bench.store.lease(other):
                pass
            bench.close()
        (damage,) = found_by_verify(pack)  # it reads whole packs: once for each block
        assert (damage.file, damage.what) == (DATA, str(block.id))
        assert damage.offset <= page < damage.offset + damage.nbytes


def found_by_verify(pack: Path) -> list:
    return verify(pack, EngineConfig.resolve(host_memory="64MiB", disk_depth=2)).damages


def test_every_damaged_row_is_found_and_no_other_is_refused(
    pack: Path, checkpoint: Path, tied: bool
) -> None:
    bench = open_store(pack, slots_bytes=1 << 17, tied=tied)
    table = bench.layouts[EMBEDDING].tables["weight"]
    every = torch.arange(VOCABULARY)
    rows = bench.store.rows(EMBEDDING, "weight", every)
    bench.close()
    assert table.sums is not None and table.sums.run_rows == 4096 // (2 * WIDTH)
    whole = (pack / DATA).read_bytes()
    for span in table.parts[0].spans:
        for at in range(span.file.offset, span.file.offset + span.file.nbytes, 1000):
            flip(pack / DATA, at)
            bench = open_store(pack, slots_bytes=1 << 17, tied=tied)
            bad = span.first + (at - span.file.offset) // table.row_bytes
            with pytest.raises(DamagedPackError, match=str(pack / DATA)):
                bench.store.rows(EMBEDDING, "weight", torch.tensor([bad]))
            run = (bad - span.first) // table.run_rows
            first = span.first + run * table.run_rows
            end = min(first + table.run_rows, span.end)
            good = torch.tensor([row for row in range(VOCABULARY) if not first <= row < end])
            assert torch.equal(bench.store.rows(EMBEDDING, "weight", good), rows[good])
            bench.close()
            (pack / DATA).write_bytes(whole)


def test_damaged_checksums_of_rows_are_found(pack: Path, tied: bool) -> None:
    (sums,) = read_manifest(pack).sums
    flip(pack / DATA, sums.extent.offset + 5)
    bench = open_store(pack, slots_bytes=1 << 17, tied=tied)
    with pytest.raises(DamagedPackError, match="checksums of embed"):
        bench.store.rows(EMBEDDING, "weight", torch.tensor([3]))
    bench.close()
    assert len(found_by_verify(pack)) == 1
    bench = open_store(pack, slots_bytes=1 << 17, tied=tied, verify=Verify.NEVER)
    bench.store.rows(EMBEDDING, "weight", torch.tensor([3]))
    bench.close()


@pytest.mark.parametrize(
    ("verify_reads", "at_first", "later"),
    [
        (Verify.FIRST, True, False),
        (Verify.ALWAYS, True, True),
        (Verify.NEVER, False, False),
    ],
)
def test_when_blocks_are_verified(
    pack: Path, tied: bool, verify_reads: Verify, at_first: bool, later: bool
) -> None:
    (one, *others) = LEASABLE
    extent = next(b.extent for b in read_manifest(pack).blocks if b.id == one)
    assert extent is not None

    def lease_is_refused() -> bool:
        try:
            with bench.store.lease(one):
                return False
        except DamagedPackError:
            return True

    def damage() -> None:  # in place: the readers keep the file open
        with (pack / DATA).open("r+b") as file:
            file.seek(extent.offset)
            byte = file.read(1)[0]
            file.seek(extent.offset)
            file.write(bytes([byte ^ 1]))

    bench = open_store(pack, slots_bytes=1 << 16, tied=tied, verify=verify_reads)
    damage()
    assert lease_is_refused() == at_first
    damage()  # once more: it is whole again
    assert not lease_is_refused()
    damage()
    for block in others:  # until it has left its slot
        with bench.store.lease(block):
            pass
    assert lease_is_refused() == later
    bench.close()


def test_missing_and_truncated_files_are_named(pack: Path) -> None:
    names = [*read_manifest(pack).files, *read_manifest(pack).copies]
    assert names == [DATA, "config.json"]
    for name in names:
        content = (pack / name).read_bytes()
        (pack / name).unlink()
        with pytest.raises(MissingFileError, match=name):
            open_pack(pack)
        assert {damage.file for damage in found_by_verify(pack)} == {name}
        for other in (content[:-1], content + b"x"):
            (pack / name).write_bytes(other)
            with pytest.raises(DamagedPackError, match=rf"{name} has {len(other)} bytes"):
                open_pack(pack)
            assert {damage.file for damage in found_by_verify(pack)} == {name}
        (pack / name).write_bytes(content)
    flip(pack / "config.json", 3)
    with pytest.raises(DamagedPackError, match=r"config\.json has changed"):
        open_pack(pack)
    (pack / "manifest.json").unlink()
    with pytest.raises(MissingFileError, match="manifest"):
        open_pack(pack)


def test_a_model_of_other_blocks_is_refused(packs: dict[str, Path], tied: bool) -> None:
    opened = open_pack(packs["w4a8"])
    with pytest.raises(PackError, match="convert the checkpoint again"):
        opened.layouts(model_spec(tied), target("w8a8"))
    spec = model_spec(tied)
    blocks = spec.blocks[:-1]
    with pytest.raises(PackError, match="blocks"):
        opened.layouts(type(spec)("Test", LAYERS, WIDTH, 96, 128, blocks, (), 1), target("w4a8"))


def test_slots_do_not_depend_on_where_tensors_lie_in_files(
    checkpoint: Path, tmp_path: Path, tied: bool
) -> None:
    bound = bind(model_spec(tied), open_checkpoint(checkpoint))
    layouts = lay_out(bound, target("none"), in_place=False)
    for layout in layouts.values():
        end = 0
        for placed in layout.placed:
            assert 0 <= placed.at[0] - end < 64
            end = placed.at[0] + placed.param.data.nbytes
        assert 0 <= layout.slot_bytes - end < 4096


def test_a_damaged_block_is_readable_again_once_it_is_whole(pack: Path, tied: bool) -> None:
    block = LEASABLE[1]
    extent = next(b.extent for b in read_manifest(pack).blocks if b.id == block)
    assert extent is not None
    whole = (pack / DATA).read_bytes()
    flip(pack / DATA, extent.offset)
    bench = open_store(pack, slots_bytes=1 << 17, tied=tied)
    with pytest.raises(DamagedPackError), bench.store.lease(block):
        pass
    with (pack / DATA).open("r+b") as file:
        file.write(whole)
    with bench.store.lease(block):
        pass
    bench.close()
