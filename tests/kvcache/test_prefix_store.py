"""Prefixes on the disk: what was saved is read back or counts as never saved, whatever happens.

What a kill leaves is imitated by calls of the system that fail from a certain one on, so that
nothing more is written whatever the code does on its way out.
"""

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Tier
from hmt.kvcache.prefix import PrefixStore, segments, store_buffer_bytes
from hmt.kvcache.prefix.segments import pages_within, segment_bytes
from hmt.memory import HostPool, Ledger

pytestmark = pytest.mark.usefixtures("quick_processes")

PAGE_BYTES = 768
SEGMENT = 4 * PAGE_BYTES  # four pages in a file
MOST = 1 << 20
CALLS = (
    "pwrite", "fsync", "posix_fallocate", "utime", "rename", "unlink", "mkdir", "open", "listdir",
    "scandir", "preadv", "stat",
)  # fmt: skip
CALLS_THAT_WRITE = ("pwrite", "fsync", "posix_fallocate", "utime", "rename", "unlink", "mkdir")


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    nbytes = 4 * store_buffer_bytes(1 << 24)
    made = HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "prefixes", nbytes))
    yield made
    made.close()


def text(*pages: int) -> list[int]:
    return [PAGE_TOKENS * page + at for page in pages for at in range(PAGE_TOKENS)]


def content(name: str, page: int, count: int = PAGE_BYTES) -> torch.Tensor:
    """Bytes that stand for the keys and values of a page that comes at the end of a text."""
    generator = torch.Generator().manual_seed(hash((name, page)) % (1 << 40))
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


class Client:
    """A process that uses the folder."""

    def __init__(self, folder: Path, pool: HostPool, model: str = "m", **options: int) -> None:
        options = {"capacity_bytes": MOST, "segment_bytes": SEGMENT} | options
        self.page_bytes = options.pop("page_bytes", PAGE_BYTES)
        self.model = model
        self.store = PrefixStore(folder, model, self.page_bytes, pool, **options)

    def save(self, *pages: int, salt: str = "") -> int:
        """Save a text; how many pages were written."""
        name = f"{self.model} {salt}"

        def export(first: int, memory: torch.Tensor) -> None:
            for at, row in enumerate(memory):
                row[:] = content(name, hash(pages[: first + at + 1]), self.page_bytes)

        keys, written = self.store.keys([*text(*pages), 5], salt), 0
        while count := self.store.save(keys, export):
            written += count
        return written

    def load(self, *pages: int, first: int = 0, salt: str = "") -> int:
        """Load a text; how many of its pages were there.  They must be the right ones."""
        rows: list[torch.Tensor] = []
        keys = self.store.keys(text(*pages), salt)
        held = self.store.held(keys)
        loaded = self.store.load(keys, first, lambda memory: rows.extend(memory.clone()))
        assert len(rows) == loaded <= max(0, held - first)
        for at, row in enumerate(rows, first + 1):
            wanted = content(f"{self.model} {salt}", hash(pages[:at]), self.page_bytes)
            assert torch.equal(row, wanted)
        return loaded

    def close(self) -> None:
        self.store.close()


@contextmanager
def client(folder: Path, pool: HostPool, model: str = "m", **options: int) -> Iterator[Client]:
    made = Client(folder, pool, model, **options)
    try:
        yield made
    finally:
        made.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.hmtkv"))


def test_what_was_saved_is_there_after_a_restart(tmp_path, pool):
    with client(tmp_path, pool) as first:
        assert first.load(1, 2, 3) == 0
        assert first.save(*range(10)) == 10
        assert first.save(*range(10)) == 0
        assert first.save(*range(6), 77, 78) == 2, "what both begin with is there"
        assert first.load(*range(6), 77, 78, 79) == 8
    assert len(files(tmp_path)) == 4
    with client(tmp_path, pool) as second:
        assert second.load(*range(20)) == 10
        assert second.load(*range(6), 77, 78) == 8
        assert second.load(*range(7), first=3) == 4
        assert second.load(*range(7), first=7) == 0
        assert second.load(1, 2) == 0, "the same pages, behind others"
        assert second.save(*range(12)) == 2
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(tmp_path))


def test_models_and_salts_do_not_mix(tmp_path, pool):
    with client(tmp_path, pool, "one") as one, client(tmp_path, pool, "two") as two:
        assert one.save(1, 2, 3) == 3
        assert two.load(1, 2, 3) == 0
        assert one.load(1, 2, 3, salt="images") == 0
        assert two.save(1, 2, 3) == 3
        assert one.save(1, 2, salt="images") == 2
        assert (one.load(1, 2, 3), two.load(1, 2, 3), one.load(1, 2, 3, salt="images")) == (3, 3, 2)


def test_many_tokens_take_few_reads(tmp_path, pool, monkeypatch):
    real, reads = os.preadv, []

    def counted(file, views, offset):
        reads.append(sum(map(len, views)))
        return real(file, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    pages = 30_000 // PAGE_TOKENS
    with client(tmp_path, pool, segment_bytes=64 << 20, capacity_bytes=1 << 30) as made:
        keys = made.store.keys(text(*range(pages)))
        row = torch.arange(PAGE_BYTES) % 251
        made.store.save(keys, lambda first, memory: memory.copy_(row.to(torch.uint8)))
        seen: list[int] = []
        assert made.store.load(keys, 0, lambda memory: seen.append(len(memory))) == pages
    assert sum(reads) == pages * PAGE_BYTES
    assert len(reads) == len(seen) == 1


@given(st.integers(0, 1 << 34), st.sampled_from([256, 768, 4096, 65536, 1 << 24]))
def test_a_file_has_as_many_pages_as_fit(nbytes, page_bytes):
    pages = pages_within(nbytes, page_bytes)
    assert pages == 0 or segment_bytes(pages, page_bytes) <= nbytes
    assert segment_bytes(pages + 1, page_bytes) > nbytes


def test_pages_of_few_bytes_are_counted_at_once(monkeypatch):
    """One at a time, the pages of a model without keys and values took seconds for each file."""
    counted = 0
    own = segments.segment_bytes

    def watched(pages: int, page_bytes: int) -> int:
        nonlocal counted
        counted += 1
        return own(pages, page_bytes)

    monkeypatch.setattr(segments, "segment_bytes", watched)
    assert pages_within(1 << 32, 256) > 1 << 23
    assert counted < 1000


def test_pages_larger_than_a_piece(tmp_path, pool):
    with client(tmp_path, pool, page_bytes=9 << 20, capacity_bytes=1 << 30) as made:
        assert made.save(1, 2, 3) == 3
        assert made.load(1, 2, 3, 4) == 3
    assert len(files(tmp_path)) == 3


def test_the_least_recently_used_go_and_ends_before_beginnings(tmp_path, pool):
    most = 3 * segment_bytes(4, PAGE_BYTES)
    with client(tmp_path, pool, capacity_bytes=most) as made, client(tmp_path, pool, "b") as other:
        assert made.save(*range(8)) == 8
        assert other.save(50, 51, 52, 53) == 4
        assert made.save(60, 61, 62, 63) == 4
        assert made.load(*range(8)) == 4, "the second half of what was used least recently"
        assert made.save(70, 71, 72, 73) == 4
        assert other.load(50, 51) == 0
        assert (made.load(*range(8)), made.load(60, 61, 62, 63)) == (4, 4)
        assert made.store.counters.evicted == 2
        assert made.save(*range(100, 150)) == 12, "no more than there is room for"
        assert made.load(*range(100, 150)) == 12
        assert sum(file.stat().st_size for file in files(tmp_path)) <= most


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_folder_never_grows_beyond_its_bound(tmp_path_factory, pool, data):
    folder = tmp_path_factory.mktemp("bound")
    most = data.draw(st.integers(segment_bytes(1, PAGE_BYTES), 40_000))
    texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    with client(folder, pool, capacity_bytes=most) as made:
        for _ in range(data.draw(st.integers(1, 10))):
            pages = data.draw(texts)
            if data.draw(st.booleans()):
                made.save(*pages)
            made.load(*pages)
            assert sum(file.stat().st_size for file in folder.iterdir()) <= most
    shutil.rmtree(folder)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_found_told_and_mended(tmp_path_factory, pool, caplog, data):
    folder = tmp_path_factory.mktemp("damage")
    caplog.clear()
    with client(folder, pool) as made:
        made.save(*range(10))
        known = data.draw(st.booleans())
        chosen = data.draw(st.sampled_from(files(folder)))
        held = bytearray(chosen.read_bytes())
        at = data.draw(st.sampled_from([0, 8, 24, 40, 60, 150, 170, 4096, 5000, len(held) - 1]))
        if data.draw(st.booleans()):
            held[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del held[at:]
        chosen.write_bytes(held)
        number = int(chosen.name.split("-")[1])
        if known:
            good = made.load(*range(10))
        else:
            with client(folder, pool) as later:
                good = later.load(*range(10))
        assert number <= good <= 10
        # Zeros that only fill the header up do not matter.
        assert (good == 10) == (caplog.text == "")
        assert caplog.text.count(str(chosen)) == (good < 10)
        assert chosen.exists() == (good == 10)
        made.save(*range(10))
        assert made.load(*range(10)) == 10
    shutil.rmtree(folder)


def test_files_that_go_meanwhile_are_no_error(tmp_path, pool, caplog):
    with client(tmp_path, pool) as made:
        made.save(*range(12))
        keys = made.store.keys(text(*range(12)))
        assert made.store.held(keys) == 12
        files(tmp_path)[1].unlink()
        rows: list[torch.Tensor] = []
        assert made.store.load(keys, 0, rows.append) == 4
        assert made.save(*range(12)) == 4
        assert made.load(*range(12)) == 12
    assert caplog.text == ""


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, pool):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name a folder that is yours"):
        Client(tmp_path / "file", pool)
    with pytest.raises(ConfigError, match="less than one page"):
        Client(tmp_path, pool, capacity_bytes=100)


def test_files_of_others_are_left_alone(tmp_path, pool):
    for name in ("thesis.txt", "my.hmtkv"):
        (tmp_path / name).write_text("mine")
    with client(tmp_path, pool, capacity_bytes=10_000) as made:
        for page in range(0, 100, 4):
            made.save(page, page + 1, page + 2, page + 3)
    assert (tmp_path / "thesis.txt").read_text() == (tmp_path / "my.hmtkv").read_text() == "mine"


class Killed(BaseException):
    """The process is no more."""


class System:
    """The system's calls, of which number `fatal` and, if `for_good`, all after it raise `error`.

    `durable` has the bytes that files had when they were last synced, by their numbers.
    """

    def __init__(self, fatal: int, error: Callable[[], BaseException], for_good: bool) -> None:
        self.calls = 0
        self.fatal, self.error, self.for_good = fatal, error, for_good
        self.durable: dict[int, bytes] = {}

    def wrap(self, name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            self.calls += 1
            if self.calls == self.fatal or (self.calls > self.fatal and self.for_good):
                raise self.error()
            result = real(*arguments, **options)
            if name == "fsync":
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                if path.is_file():
                    self.durable[path.stat().st_ino] = path.read_bytes()
            return result

        return call


@contextmanager
def system(
    fatal: int,
    error: Callable[[], BaseException] = Killed,
    *,
    for_good: bool = True,
    calls: tuple[str, ...] = CALLS_THAT_WRITE,
) -> Iterator[System]:
    with pytest.MonkeyPatch.context() as patch:
        made = System(fatal, error, for_good)
        for name in calls:
            patch.setattr(os, name, made.wrap(name))
        yield made


OLD, NEW = (40, 41, 42, 43, 44), (0, 1, 2, 3, 4, 5, 6, 7, 8)
BOUND = segment_bytes(4, PAGE_BYTES) * 3 + segment_bytes(1, PAGE_BYTES)


def work(folder: Path, pool: HostPool) -> None:
    """Files are written, and others go for them."""
    with client(folder, pool, capacity_bytes=BOUND) as made:
        made.save(*NEW)
        made.load(*NEW)


def prepared(folder: Path, pool: HostPool) -> None:
    with client(folder, pool, capacity_bytes=BOUND) as made:
        assert made.save(*OLD) == 5


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power failure"])
def test_a_crash_at_any_call_leaves_whole_files(tmp_path, pool, power, caplog):
    prepared(tmp_path / "0", pool)
    with system(10**9) as counted:
        work(tmp_path / "0", pool)
    assert counted.calls > 20
    for fatal in range(1, counted.calls + 1):
        folder = tmp_path / f"{power} {fatal}"
        prepared(folder, pool)
        kept = {file.stat().st_ino: file.read_bytes() for file in files(folder)}
        with system(fatal) as died, pytest.raises(Killed):
            work(folder, pool)
        if power:
            for file in [f for f in folder.iterdir() if f.is_file()]:
                number = file.stat().st_ino
                file.write_bytes(died.durable.get(number, kept.get(number, b"")))
        with client(folder, pool, capacity_bytes=BOUND) as later:
            assert sum(f.stat().st_size for f in folder.iterdir()) <= BOUND
            assert later.load(*OLD) in (0, 4, 5)
            assert later.load(*NEW) in (0, 4, 8, 9)
            later.save(*NEW)
            assert later.load(*NEW) == 9
        assert {f.name for f in folder.iterdir()} == {"lock", *(f.name for f in files(folder))}
    assert caplog.text == "", "nothing was damaged"


def test_a_prefix_that_was_renamed_is_durable(tmp_path, pool):
    with system(10**9) as counted:
        work(tmp_path, pool)
    for file in files(tmp_path):
        assert counted.durable[file.stat().st_ino] == file.read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_failing_drive_is_told_once_and_loses_nothing(tmp_path, pool, code, caplog):
    prepared(tmp_path / "0", pool)
    with system(10**9, calls=CALLS) as counted:
        work(tmp_path / "0", pool)
    for fatal in range(1, counted.calls + 1):
        folder = tmp_path / str(fatal)
        prepared(folder, pool)
        caplog.clear()
        failing = {"error": lambda: OSError(code, os.strerror(code)), "for_good": False}
        with system(fatal, calls=CALLS, **failing):
            try:
                work(folder, pool)
            except ConfigError:
                assert counted.calls > 20
                continue
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) <= 1
        with client(folder, pool, capacity_bytes=BOUND) as later:
            assert later.load(*OLD) in (0, 4, 5)
            later.save(*NEW)
            assert later.load(*NEW) == 9


def test_a_drive_that_stays_full_is_told_once_and_nothing_goes_for_it(tmp_path, pool, caplog):
    prepared(tmp_path, pool)
    with pytest.MonkeyPatch.context() as patch:

        def full(file: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "posix_fallocate", full)
        with client(tmp_path, pool, capacity_bytes=BOUND) as made:
            for _ in range(5):
                assert made.save(*NEW) == 0
            assert made.load(*OLD) == 5
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert str(tmp_path) in caplog.text


PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_prefix_store import Client, HostPool, Ledger, Tier, store_buffer_bytes
nbytes = store_buffer_bytes(1)
pool = HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "prefixes", nbytes))
client = Client(Path(sys.argv[2]), pool, capacity_bytes=int(sys.argv[3]))
for turn in range(60):
    text = [turn % 5, *range(int(sys.argv[4]), 10)]
    client.save(*text)
    client.load(*text)
    client.load(turn % 7, *range(2, 10))
print(client.store.counters.damaged)
"""


def test_several_processes_use_one_folder(tmp_path, pool):
    most = 9 * segment_bytes(4, PAGE_BYTES)
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", PROCESS, here, str(tmp_path), str(most)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    children = [
        subprocess.Popen([*arguments, first], env=environment, **options) for first in ("2", "3")
    ]
    for child in children:
        out, told = child.communicate(timeout=120)
        assert child.returncode == 0, told
        assert (out.strip(), told) == ("0", "")
    assert sum(file.stat().st_size for file in files(tmp_path)) <= most
