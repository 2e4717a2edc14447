"""Beginnings of sequences on the disk, where a later run of the program finds them."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hmt.base.errors import ConfigError, os_reason
from hmt.base.folders import sync_folder
from hmt.base.log import logger, warn_once
from hmt.base.units import MIB, format_bytes
from hmt.kvcache.page_store import Pool
from hmt.kvcache.prefix.fairness import allowance
from hmt.kvcache.prefix.segments import (
    KEY_BYTES,
    DamagedSegmentError,
    Segment,
    owner_tag,
    page_keys,
    page_sums,
    pages_within,
    read_header,
    read_name,
    root_key,
    segment_bytes,
)

# Large enough for a disk's full rate, small enough that a turn of talk does not wait for one.
_SEGMENT_BYTES = 64 * MIB
_PIECE_BYTES = 8 * MIB
_BUFFERS = 4  # one is copied from while the others are read

_LOCK, _UNFINISHED = "lock", "unfinished"

Export = Callable[[int, torch.Tensor], None]
Import = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class StoreCounters:
    """Pages that were written and read, and files that went: for room, or because of damage."""

    written_pages: int = 0
    read_pages: int = 0
    evicted: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Pages in a row in one file: `count` from number `at` of it on."""

    name: str
    at: int
    count: int


def store_buffer_bytes(page_bytes: int) -> int:
    """Host memory that a store takes for pages on their way."""
    return _BUFFERS * max(page_bytes, _PIECE_BYTES)


class PrefixStore:
    """A folder with pages of the prefixes of sequences, used by any number of processes at once.

    Files are written under another name, made durable, and then renamed, one process at a time; a
    reader sees a whole file or none.  Each page has a checksum: what is damaged is removed, told
    in the log, and counts as never kept.  Nothing here raises because of the disk.

    When the folder is full, the owner whose files take most loses the least recently used of them,
    whichever model they are of; of one sequence the last pages first.  So no owner evicts files of
    another that are within its share (`fairness`).  While a file is written the folder may have
    that much more.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        page_bytes: int,
        pool: Pool[Any],
        *,
        capacity_bytes: int,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        """Keeps at most `capacity_bytes` in `folder`, which is made if need be, for this user only.

        fingerprint     of all that the bytes of pages depend on: checkpoint, layout, encoding
        page_bytes      of one page of all layers
        pool            gives `store_buffer_bytes(page_bytes)`
        segment_bytes   about the size of a file
        Raises ConfigError where the folder cannot be used, BudgetError where the pool is too small.
        """
        self.folder = folder
        self.counters = StoreCounters()
        self._model = hashlib.blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest()
        self._page_bytes = page_bytes
        self._capacity_bytes = capacity_bytes
        self._segment_pages = max(1, segment_bytes // page_bytes)
        self._piece_pages = max(1, _PIECE_BYTES // page_bytes)
        self._files: dict[str, Segment] = {}
        self._index: dict[bytes, tuple[str, int]] = {}  # key: file, number in it
        self._unreadable: set[str] = set()
        self._open_folder()
        self._pool = pool
        self._memory = pool.allocate(store_buffer_bytes(page_bytes))
        size = len(self._memory.tensor) // _BUFFERS
        rows = [m[: size // page_bytes * page_bytes] for m in self._memory.tensor.split(size)]
        self._buffers = [row.view(-1, page_bytes) for row in rows[:_BUFFERS]]
        self._threads = ThreadPoolExecutor(_BUFFERS - 1, "hmt-prefix")

    def close(self) -> None:
        """Give the memory back.  What was saved stays."""
        self._threads.shutdown()
        self._buffers.clear()
        self._pool.free(self._memory)

    def keys(self, tokens: Sequence[int] | np.ndarray, salt: str = "") -> list[bytes]:
        """Names of the whole pages of a text, which its other methods take; see PrefixTree."""
        return page_keys(root_key(self._model, salt), tokens)

    def held(self, keys: Sequence[bytes]) -> int:
        """How many pages, from the first on, are there now."""
        try:
            self._look()
        except OSError as error:
            self._tell(error)
        return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def known(self, keys: Sequence[bytes]) -> bool:
        """Whether all of them were there when `held` was last asked."""
        return all(key in self._index for key in keys)

    def load(self, keys: Sequence[bytes], first: int, put: Import) -> int:
        """Read pages from number `first` on, in order; how many there were.

        put   is called with uint8 [pages, page_bytes], which is valid until it returns
        """
        pieces = self._pieces(keys, first)
        self._touch({piece.name for piece in self._pieces(keys, 0)}, time.time_ns())
        waiting: deque[tuple[_Piece, torch.Tensor, Future[int]]] = deque()
        loaded, number = 0, 0
        try:
            while True:
                while len(waiting) < _BUFFERS - 1 and (piece := next(pieces, None)):
                    memory = self._buffers[number % _BUFFERS][: piece.count]
                    segment = self._files[piece.name]
                    future = self._threads.submit(self._read, segment, piece, memory)
                    waiting.append((piece, memory, future))
                    number += 1
                if not waiting:
                    break
                piece, memory, future = waiting.popleft()
                good = self._outcome(piece, future)
                if good:
                    put(memory[:good])
                loaded += good
                if good < piece.count:
                    break
        finally:
            for _, _, future in waiting:
                future.exception()
        self.counters.read_pages += loaded
        return loaded

    def save(self, keys: Sequence[bytes], export: Export, owner: str = "") -> int:
        """Write the pages behind those that are there, in one file; how many it has.

        0 if all are there, or they cannot be kept: a full disk is told once.  So to save a text is
        to call this until it returns 0, with other work in between, if there is any.

        export   fills uint8 [pages, page_bytes] with pages from a number on
        owner    the one that the file counts for
        """
        try:
            with self._locked():
                held = self.held(keys)
                names = {piece.name for piece in self._pieces(keys, 0)}
                now, tag = time.time_ns(), owner_tag(owner)
                self._touch(names, now)
                count = min(len(keys) - held, self._segment_pages, self._room_beside(names, tag))
                if count <= 0:
                    return 0
                self._write(keys, held, count, export, now, tag)
        except OSError as error:
            self._tell(error)
            return 0
        self.counters.written_pages += count
        return count

    def _write(
        self, keys: Sequence[bytes], first: int, count: int, export: Export, now_ns: int, tag: str
    ) -> None:
        unfinished = self.folder / _UNFINISHED
        nbytes = segment_bytes(count, self._page_bytes)
        begin = nbytes - count * self._page_bytes
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)  # a full disk is found before anything goes
            self._make_room(nbytes, tag)
            sums: list[int] = []
            for at in range(0, count, self._piece_pages):
                memory = self._buffers[0][: min(self._piece_pages, count - at)]
                export(first + at, memory)
                content = memory.numpy().reshape(-1).data
                sums += page_sums(content, self._page_bytes)
                _write_all(file, content, begin + at * self._page_bytes)
            chosen = tuple(keys[first : first + count])
            segment = Segment(self._model, self._page_bytes, first, chosen, tuple(sums), tag)
            _write_all(file, memoryview(segment.header()), 0)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.utime(file, ns=(now_ns, now_ns))  # as those before it, or they would go first
            os.rename(unfinished, self.folder / segment.name)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        finally:
            os.close(file)
        self._add(segment)
        sync_folder(self.folder)

    def _pieces(self, keys: Sequence[bytes], first: int) -> Iterator[_Piece]:
        """Where pages from number `first` on are, as far as they are known to be there."""
        name, at, count = "", 0, 0
        for key in keys[first:]:
            found = self._index.get(key)
            if found is None:
                break
            if found == (name, at + count) and count < self._piece_pages:
                count += 1
                continue
            if count:
                yield _Piece(name, at, count)
            (name, at), count = found, 1
        if count:
            yield _Piece(name, at, count)

    def _read(self, segment: Segment, piece: _Piece, memory: torch.Tensor) -> int:
        """Fill `memory`; how many of its pages, from the first on, are as they were written."""
        view = memory.numpy().reshape(-1).data
        file = os.open(self.folder / piece.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = segment.header_bytes + piece.at * self._page_bytes
            done = 0
            while done < len(view):
                got = os.preadv(file, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        finally:
            os.close(file)
        sums = page_sums(view[: done // self._page_bytes * self._page_bytes], self._page_bytes)
        wanted = segment.sums[piece.at : piece.at + piece.count]
        same = [ours == theirs for ours, theirs in zip(sums, wanted, strict=False)]
        return same.index(False) if False in same else len(same)

    def _outcome(self, piece: _Piece, reading: "Future[int]") -> int:
        """Good pages of a piece; forgets its file where not all are."""
        try:
            good = reading.result()
        except FileNotFoundError:  # another process needed the room
            self._forget(piece.name)
            return 0
        except OSError as error:
            self._forget(piece.name)
            self._unreadable.add(piece.name)
            self._tell(error)
            return 0
        if good < piece.count:
            self._damaged(piece.name, f"page {piece.at + good} is not what was written")
        return good

    def _look(self) -> None:
        """Learn of files that came, and forget those that went."""
        prefix = self._model.hex()
        there = os.listdir(self.folder)
        names = {n for n in there if n.startswith(prefix) and read_name(n) is not None}
        for name in self._files.keys() - names:
            self._forget(name)
        for name in sorted(names - self._files.keys() - self._unreadable):
            try:
                segment = read_header(self.folder / name)
                if segment.name != name or segment.page_bytes != self._page_bytes:
                    raise DamagedSegmentError("its header is that of another")
            except FileNotFoundError:
                continue
            except OSError as error:
                self._unreadable.add(name)
                self._tell(error)
                continue
            except DamagedSegmentError as error:
                self._damaged(name, str(error))
                continue
            self._add(segment)

    def _add(self, segment: Segment) -> None:
        self._files[segment.name] = segment
        for at, key in enumerate(segment.keys):
            self._index.setdefault(key, (segment.name, at))

    def _forget(self, name: str) -> None:
        if self._files.pop(name, None):
            files, self._files, self._index = self._files, {}, {}
            for segment in files.values():
                self._add(segment)

    def _damaged(self, name: str, why: str) -> None:
        self.counters.damaged += 1
        logger.warning("%s is removed: %s; check the disk", self.folder / name, why)
        self._forget(name)
        self._unreadable.add(name)
        try:
            (self.folder / name).unlink(missing_ok=True)
            self._unreadable.discard(name)
        except OSError as error:
            self._tell(error)

    def _room_beside(self, names: set[str], tag: str) -> int:
        """Pages that a file of an owner may have, if of its other files only `names` stay."""
        sizes: Counter[str] = Counter()
        for _, _, owner, size in self._every_file():
            sizes[owner] += size
        stays = [segment for name, segment in self._files.items() if name in names]
        room = allowance(sizes, tag, self._capacity_bytes, self._capacity_bytes)
        room -= sum(segment.nbytes for segment in stays if segment.owner == tag)
        room = min(room, self._capacity_bytes - sum(segment.nbytes for segment in stays))
        return pages_within(room, self._page_bytes)

    def _make_room(self, nbytes: int, tag: str) -> None:
        """Delete files until `nbytes` more, of an owner, are within the bound."""
        sizes, files = Counter({tag: nbytes}), dict[str, list[tuple[tuple[int, int], str, int]]]()
        for age, name, owner, size in self._every_file():
            files.setdefault(owner, []).append((age, name, size))
            sizes[owner] += size
        for theirs in files.values():
            theirs.sort(reverse=True)
        while files and sizes.total() > self._capacity_bytes:
            owner = max(files, key=lambda name: sizes[name])
            _, name, size = files[owner].pop()
            if not files[owner]:
                del files[owner]
            (self.folder / name).unlink(missing_ok=True)
            self._forget(name)
            self.counters.evicted += 1
            sizes[owner] -= size

    def _every_file(self) -> Iterator[tuple[tuple[int, int], str, str, int]]:
        """Of each model's segments: which goes first, its name, its owner's tag and its bytes."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                named = read_name(entry.name)
                with contextlib.suppress(FileNotFoundError):  # it was damaged
                    if named is not None:
                        status = entry.stat()
                        age = (status.st_mtime_ns, -named[0])
                        yield age, entry.name, named[1], status.st_size

    def _touch(self, names: set[str], now_ns: int) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # it may have gone, or be another user's
                os.utime(self.folder / name, ns=(now_ns, now_ns))

    def _open_folder(self) -> None:
        least = segment_bytes(1, self._page_bytes)
        if self._capacity_bytes < least:
            raise ConfigError(
                f"{format_bytes(self._capacity_bytes)} for prefixes in {self.folder} is less than "
                f"one page takes, {format_bytes(least)}: give more, or none"
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                (self.folder / _UNFINISHED).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"prefixes cannot be kept in {self.folder} ({os_reason(error)}): name a folder "
                "that is yours"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile; what a dead process was writing is left, and no more."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.folder / _LOCK, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _tell(self, error: OSError) -> None:
        warn_once(
            f"prefixes {self.folder} {error.errno}",
            f"prefixes in {self.folder} cannot be kept or used: {os_reason(error)}; what is not "
            "there is computed, and what is there stays",
        )


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
