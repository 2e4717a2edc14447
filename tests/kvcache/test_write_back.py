"""Pages on their way to a disk that is late, full, or broken, and in a process that is killed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from test_tiered_cache import CHUNK, HOT, CachedSequences, Machine, machine

from hmt.base.errors import DiskReadError
from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.page_table import PageTier

pytestmark = pytest.mark.usefixtures("quick_processes")

__all__ = ["machine"]  # the fixture


class Drive:
    """os.pwrite that waits for `open`, and fails while `error` is set."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()
        self.error: int | None = None
        self.calls = 0
        self._pwrite = os.pwrite

    def pwrite(self, file: int, view: memoryview, offset: int) -> int:
        self.calls += 1
        self.asked.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        # As much as a disk may take at once, and no more.
        return self._pwrite(file, view[: len(view) // 2 // 4096 * 4096 or len(view)], offset)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    made = Drive()
    monkeypatch.setattr(os, "pwrite", made.pwrite)
    return made


@pytest.mark.parametrize("warm", [0, 60])
def test_steps_do_not_wait_for_a_late_drive_until_room_is_needed(
    machine: Machine, drive: Drive, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = machine.cache(warm=warm, cold=12)
    account, places = cache.account, cache._places
    cached = CachedSequences(cache, seed=5)
    free = cache.allocator.free_tokens
    text = cached.open((HOT + warm + 100) * PAGE_TOKENS)
    while not drive.asked.is_set():
        cached.step({text: CHUNK})
        assert cached.length(text) < (HOT + warm) * PAGE_TOKENS, "it is begun before room is needed"
        drive.asked.wait(0.05)
    going = places.queue.ids
    for _ in range(3):  # all of what is on its way is attended to where it was
        cached.step({text: 5})
    assert (places.page_table.level_of(going) != PageTier.DISK).all()
    assert not account.stalled_s and not any("disk" in way for way in account.moved)
    other = cached.open(200)
    cached.step({other: 7})

    def opening(future: Future[None], timeout: float | None = None) -> BaseException | None:
        drive.open.set()
        return exception(future, timeout)

    exception = Future.exception
    monkeypatch.setattr(Future, "exception", opening)  # now a step waits
    while (left := (HOT + warm + 100) * PAGE_TOKENS - cached.length(text)) > 0:
        cached.step({text: min(CHUNK, left)})
    assert account.stalled_s > 0, "the step that needed the room before the disk had come round"
    assert (places.page_table.level_of(going) == PageTier.DISK).sum() >= 16
    assert account.written_back_pages == account.moved[f"{'host' if warm else 'near'} to disk"]
    cached.read(text)
    cached.read(other)
    cached.close(text)
    cached.close(other)
    assert cache.allocator.free_tokens == free
    cache.release()


def test_pages_that_were_given_up_while_they_were_written_are_forgotten(
    machine: Machine, drive: Drive
) -> None:
    cache = machine.cache(cold=8)
    cached = CachedSequences(cache, seed=6)
    first = cached.open((HOT + 60) * PAGE_TOKENS)
    while not drive.asked.wait(0.01):
        cached.step({first: CHUNK})
    going = cache._places.queue.ids
    cached.close(first)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens
    second = cached.open((HOT + 60) * PAGE_TOKENS)
    cached.step({second: CHUNK})
    assert np.isin(cache.allocator.sequences[second].pages, going).any(), "ids are used again"
    drive.open.set()
    while (left := (HOT + 60) * PAGE_TOKENS - cached.length(second)) > 0:
        cached.step({second: min(CHUNK, left)})
    cached.read(second)
    cached.close(second)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens
    cache.release()


def test_a_copy_is_worth_nothing_once_its_page_may_be_written_to(
    machine: Machine, drive: Drive
) -> None:
    cache = machine.cache(cold=8)
    cached, places = CachedSequences(cache, seed=8), cache._places
    text = cached.open((HOT + 60) * PAGE_TOKENS)
    while not drive.asked.wait(0.01):
        cached.step({text: CHUNK})
    going = places.queue.ids
    places.write_back(0, lambda: [going[:1]])  # before a step that goes on with this page
    drive.open.set()
    places.queue._to_disk[0].written.result()
    places.write_back(0, lambda: [going[:0]])
    assert places.queue.pages == len(going) - 16
    cached.read(text)
    cached.close(text)
    cache.release()


@pytest.mark.parametrize("warm", [0, 60])
def test_what_a_full_drive_does_not_take_stays_where_it_is(
    machine: Machine, drive: Drive, warm: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine.cache(warm=warm, cold=12)
    account = cache.account
    cached = CachedSequences(cache, seed=7)
    text, other = cached.open((HOT + warm + 80) * PAGE_TOKENS), cached.open(200)
    cached.step({other: 30})
    drive.open.set()
    drive.error = errno.ENOSPC
    with pytest.raises(DiskReadError, match="No space left on device; name another folder"):
        while True:
            cached.step({text: CHUNK})
    assert account.failed_writes == 1 and "stay in memory until" in caplog.text
    assert not any("disk" in way for way in account.moved)
    assert (
        cache._places.page_table.level_of(cache.allocator.sequences[text].pages) != PageTier.DISK
    ).all()
    calls = drive.calls
    for _ in range(2):  # what needs no room goes on, and the disk is left alone
        cached.step({other: 1})
    assert drive.calls == calls
    cached.read(text)
    drive.error = None
    while (left := (HOT + warm + 80) * PAGE_TOKENS - cached.length(text)) > 0:
        cached.step({text: min(CHUNK, left)})
    assert account.failed_writes == 1 and account.written_back_pages >= 16, "it is asked again"
    for one in (text, other):
        cached.read(one)
        cached.close(one)
    assert cache.allocator.free_tokens == cache.allocator.capacity_tokens
    cache.release()


_CHILD = """
import os, sys, time
from pathlib import Path
import torch
from hmt.base.trace import Tracer
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.plan import Tier
from hmt.kernels import ops
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.page_store import PageStore
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue
import numpy as np

layers, folder = {0: KVLayer(KVKind.FULL, 2, 8, 8)}, Path(sys.argv[1])
pool = HostPool(Ledger({Tier.HOST: 8 << 20}).open(Tier.HOST, "kv", 8 << 20))
queue, f32 = ReadQueue(PreadReader(), Tracer()), ops.PageEncoding.F32
cold = DiskPages(folder, layers, 4, f32, pool, queue, chunk_bytes=1)
pwrite = os.pwrite
def stuck(file, view, offset):
    pwrite(file, view[:4096], offset)
    print("writing", flush=True)
    time.sleep(60)
os.pwrite = stuck
cold.write(np.arange(16), PageStore(layers, 16, f32, pool), np.arange(16)).result()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
