"""Conversions that end early: at every call of the system, by a full disk, by a changed source.

What a kill leaves is imitated by calls that fail from a certain one on, so that nothing more is
written whatever the code does on its way out.
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from doubles import model_spec, target, write_checkpoint, write_pack
from test_pack import assert_equal_folders

from hmt.base.errors import (
    CheckpointError,
    ConfigError,
    DiskReadError,
    DiskWriteError,
    MissingFileError,
    NumericsError,
    PackError,
)
from hmt.weights.pack import open_pack

CALLS = ("pwrite", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "mkdir", "rmdir")
OPTIONS = {"scheme": "w4a8", "file_bytes": 1 << 16, "sync_bytes": 80_000}


class Killed(BaseException):
    """The process is no more."""


class System:
    """The system's calls, of which number `fatal` and all after it raise `error`.

    `durable` has the bytes that files had when they were last synced.
    """

    def __init__(self, fatal: int, error: Callable[[], BaseException]) -> None:
        self.calls = 0
        self.fatal = fatal
        self.error = error
        self.durable: dict[Path, bytes] = {}

    def wrap(self, name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            self.calls += 1
            if self.calls >= self.fatal:
                raise self.error()
            result = real(*arguments, **options)
            if name in ("fsync", "fdatasync"):
                file = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                if file.is_file():
                    self.durable[file] = file.read_bytes()
            return result

        return call


@contextmanager
def system(fatal: int, error: Callable[[], BaseException] = Killed) -> Iterator[System]:
    with pytest.MonkeyPatch.context() as patch:
        made = System(fatal, error)
        for name in CALLS:
            patch.setattr(os, name, made.wrap(name))
        yield made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A pack made in one go, and the calls that took."""
    out = tmp_path_factory.mktemp("whole") / "pack"
    with system(fatal=10**9) as calls:
        write_pack(checkpoint, out, **OPTIONS)
    assert len(open_pack(out).manifest.files) > 3
    return out, calls.calls


def test_it_goes_on_after_a_kill_at_any_call(
    checkpoint: Path, whole: tuple[Path, int], tmp_path: Path
) -> None:
    expected, calls = whole
    for fatal in (*range(1, calls - 30, 4), *range(calls - 30, calls + 1)):
        out = tmp_path / f"pack-{fatal}"
        with system(fatal) as died, pytest.raises(Killed):
            write_pack(checkpoint, out, **OPTIONS)
        if out.exists():  # it was complete, and durable before it had its name
            assert_equal_folders(out, expected)
            for file in out.iterdir():
                partial = tmp_path / f"pack-{fatal}.partial" / "pack" / file.name
                assert died.durable[partial] == file.read_bytes(), file
            continue
        for folder in (out, out.with_name(out.name + ".partial")):
            with pytest.raises((MissingFileError, PackError)):
                open_pack(folder)
        write_pack(checkpoint, out, **OPTIONS)
        assert_equal_folders(out, expected)
        assert not out.with_name(out.name + ".partial").exists()
        shutil.rmtree(out)


def test_it_goes_on_after_a_power_failure_at_any_call(
    checkpoint: Path, whole: tuple[Path, int], tmp_path: Path
) -> None:
    expected, calls = whole
    for fatal in range(1, calls + 1, 5):
        out = tmp_path / f"pack-{fatal}"
        with system(fatal) as died, pytest.raises(Killed):
            write_pack(checkpoint, out, **OPTIONS)
        if out.exists():
            continue
        partial = out.with_name(out.name + ".partial")
        for file in [f for f in partial.rglob("*") if f.is_file()]:
            file.write_bytes(died.durable.get(file, b""))
        recorded = (partial / "journal").read_bytes() if (partial / "journal").exists() else b""
        seen: Counter[str] = Counter()

        def progress(what: str, done: int, total: int, seen: Counter[str] = seen) -> None:
            seen[what] += 1

        write_pack(checkpoint, out, progress=progress, **OPTIONS)
        assert_equal_folders(out, expected)
        # What was recorded had been durable before: all of it was found to be good.
        checked, converted = seen["checking what is there"], seen["converting"]
        blocks = sum(block.extent is not None for block in open_pack(out).manifest.blocks)
        assert checked == max(0, recorded.count(b"\n") - 1)
        assert checked + converted == blocks
        shutil.rmtree(out)


def test_what_is_damaged_meanwhile_is_made_again(
    checkpoint: Path, whole: tuple[Path, int], tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    with system(whole[1] // 2), pytest.raises(Killed):
        write_pack(checkpoint, out, **OPTIONS)
    files = sorted((tmp_path / "pack.partial" / "pack").glob("*.hmt"))
    assert len(files) >= 2
    content = bytearray(files[0].read_bytes())
    content[1000] ^= 4
    files[0].write_bytes(content[:-5000])
    write_pack(checkpoint, out, **OPTIONS)
    assert_equal_folders(out, whole[0])


def test_a_replaced_pack_is_there_until_the_new_one_is(
    checkpoint: Path, whole: tuple[Path, int], tmp_path: Path
) -> None:
    expected, calls = whole
    out, partial = tmp_path / "pack", tmp_path / "pack.partial"
    old = tmp_path / "other"
    write_pack(checkpoint, old, scheme="w8a8")
    for fatal in (*range(1, calls - 10, 17), *range(calls - 10, calls + 10)):
        for folder in (out, partial):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, out)
        with pytest.raises(ConfigError, match="--force"):
            write_pack(checkpoint, out, **OPTIONS)
        with system(fatal), pytest.raises(Killed):
            write_pack(checkpoint, out, force=True, **OPTIONS)
            raise Killed
        if out.exists():
            held = open_pack(out).manifest.scheme
            assert_equal_folders(out, expected if held == "w4a8" else old)
        else:  # between two renames
            assert_equal_folders(partial / "old", old)
            assert_equal_folders(partial / "pack", expected)
        write_pack(checkpoint, out, force=True, **OPTIONS)
        assert_equal_folders(out, expected)
        assert not partial.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_failing_drive_is_said_and_gone_on_from(
    checkpoint: Path, whole: tuple[Path, int], tmp_path: Path, code: int
) -> None:
    for fatal in range(5 + code % 33, whole[1], 33):
        out = tmp_path / f"pack-{fatal}"
        failing = system(fatal, lambda: OSError(code, os.strerror(code)))
        with failing, pytest.raises(DiskWriteError, match=os.strerror(code)):
            write_pack(checkpoint, out, **OPTIONS)
        if not out.exists():
            write_pack(checkpoint, out, **OPTIONS)
        assert_equal_folders(out, whole[0])


def test_too_small_a_drive_is_refused_before_anything_is_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 8, 5000))
    with pytest.raises(DiskWriteError, match=r"takes \d.* KiB more, and its disk has 4\.88 KiB"):
        write_pack(checkpoint, tmp_path / "pack")


@pytest.mark.parametrize("place", ["pack.partial", "pack.partial/pack", "pack.partial/old"])
@pytest.mark.parametrize("dangling", [True, False])
def test_links_in_the_place_of_a_draft_are_refused(
    checkpoint: Path, tmp_path: Path, place: str, dangling: bool
) -> None:
    """Python's shutil refuses to delete them, without saying which error that is."""
    there = tmp_path / "elsewhere"
    if not dangling:
        there.mkdir()
        (there / "mine").touch()
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to(there)
    with pytest.raises(ConfigError, match=rf"{place} .*symbolic link to .*elsewhere: remove"):
        write_pack(checkpoint, tmp_path / "pack", **OPTIONS)
    assert dangling or (there / "mine").exists()


def changed_sources(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    shard = next(folder.glob("*.safetensors"))
    yield shard.name, lambda: os.utime(shard, ns=(0, 0))
    yield "config.json", lambda: (folder / "config.json").write_text('{"a": 1}')
    yield "tokenizer.json", lambda: (folder / "tokenizer.json").unlink()
    yield "new.txt", lambda: (folder / "new.txt").touch()


@pytest.mark.parametrize("which", range(4))
def test_a_source_that_changed_is_refused(checkpoint: Path, tmp_path: Path, which: int) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    name, change = list(changed_sources(source))[which]
    out = tmp_path / "pack"
    with system(40), pytest.raises(Killed):
        write_pack(source, out, **OPTIONS)
    change()
    with pytest.raises(CheckpointError, match=rf"{name}.*delete .*pack\.partial"):
        write_pack(source, out, **OPTIONS)
    shutil.rmtree(tmp_path / "pack.partial")
    write_pack(source, out, **OPTIONS)
    open_pack(out).layouts(model_spec(), target("w4a8"))


def test_a_source_that_changes_during_the_conversion_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    shard = next(source.glob("*.safetensors"))

    def progress(what: str, done: int, total: int) -> None:
        os.utime(shard, ns=(done, done))

    with pytest.raises(CheckpointError, match="changed since the conversion began"):
        write_pack(source, tmp_path / "pack", progress=progress)
    assert not (tmp_path / "pack").exists()


def test_another_scheme_does_not_go_on_with_what_is_there(checkpoint: Path, tmp_path: Path) -> None:
    with system(40), pytest.raises(Killed):
        write_pack(checkpoint, tmp_path / "pack", **OPTIONS)
    with pytest.raises(CheckpointError, match="begun for w4a8, not for w8a8"):
        write_pack(checkpoint, tmp_path / "pack", scheme="w8a8")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["1.norm"][3] = float("nan")

    for number, scheme in enumerate(("none", "w4a8")):
        source = tmp_path / f"checkpoint-{number}"
        source.mkdir()
        write_checkpoint(source, change=spoil)
        with pytest.raises(NumericsError, match=r"1\.norm of layer 1 attention"):
            write_pack(source, tmp_path / "pack", scheme=scheme)
        shutil.rmtree(tmp_path / "pack.partial")
    source = tmp_path / "table"
    source.mkdir()
    spoil_table = lambda tensors: tensors["embed.weight"][5].fill_(float("inf"))  # noqa: E731
    write_checkpoint(source, tied=False, change=spoil_table)
    with pytest.raises(NumericsError, match=r"embed\.weight"):
        write_pack(source, tmp_path / "pack", tied=False)


def test_a_truncated_source_is_said(checkpoint: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    shard = next(source.glob("*.safetensors"))
    content = shard.read_bytes()

    def progress(what: str, done: int, total: int) -> None:
        shard.write_bytes(content[:9000])

    with pytest.raises((DiskReadError, CheckpointError)):
        write_pack(source, tmp_path / "pack", progress=progress)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("thing", ["file", "folder", "nowhere/pack"])
def test_only_packs_are_replaced(checkpoint: Path, tmp_path: Path, thing: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").touch()
    for force in (False, True):
        with pytest.raises(ConfigError, match="choose another"):
            write_pack(checkpoint, tmp_path / thing, force=force)
    assert (tmp_path / "folder" / "thesis.txt").exists()


def test_a_folder_of_somebody_else_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "pack.partial" / "thesis.txt"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(ConfigError, match=r"pack\.partial .* is something else"):
        write_pack(checkpoint, tmp_path / "pack", force=True)
    assert theirs.exists()
