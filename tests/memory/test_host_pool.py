"""The pool: whatever fits in sum is given, contents stay, leased buffers never move."""

import ctypes
import mmap
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from hmt.base.errors import BudgetError
from hmt.contracts.plan import Tier
from hmt.memory import PAGE_BYTES, POISON, HostBuffer, HostPool, Ledger

MIB = 1 << 20


def pool_of(limit: int, sizes: tuple[int, ...] = (), *, poison: bool = False) -> HostPool:
    ledger = Ledger({Tier.HOST: limit})
    return HostPool(ledger.open(Tier.HOST, "pool", limit), sizes, poison=poison)


def resident_pages(address: int, nbytes: int) -> int:
    """Pages of memory that the system has given to these addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * (nbytes // PAGE_BYTES))()
    done = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages)
    assert done == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages)


class Leases:
    """An owner whose buffers may move unless they are leased."""

    def __init__(self) -> None:
        self.leased: set[HostBuffer] = set()
        self.moves = 0

    def movable(self, buffer: HostBuffer) -> bool:
        return buffer not in self.leased

    def moved(self, buffer: HostBuffer) -> None:
        assert buffer not in self.leased
        self.moves += 1


class PoolMachine(RuleBasedStateMachine):
    """Buffers of announced and odd sizes come, move and go under leases, pins and trims."""

    buffers = Bundle("buffers")

    @initialize(
        pages=st.integers(0, 96),
        slack=st.integers(0, PAGE_BYTES - 1),
        announced=st.lists(st.integers(1, 20), max_size=3),
        poison=st.booleans(),
        owned=st.booleans(),
    )
    def begin(
        self, pages: int, slack: int, announced: list[int], poison: bool, owned: bool
    ) -> None:
        self.limit = pages * PAGE_BYTES + slack
        self.ledger = Ledger({Tier.HOST: self.limit})
        self.account = self.ledger.open(Tier.HOST, "pool", self.limit)
        sizes = [size * PAGE_BYTES for size in announced]
        self.pool = HostPool(self.account, sizes, poison=poison)
        self.owner = Leases()
        if owned:
            self.pool.owner_of(self.owner)
        self.poison = poison
        self.held: dict[HostBuffer, int] = {}
        self.addresses: dict[HostBuffer, int] = {}  # of those that must not move
        self.old: list[torch.Tensor] = []  # of buffers that were given up, or moved away from
        self.pinned = False
        self.stamp = 0

    @rule(target=buffers, nbytes=st.integers(1, 20 * PAGE_BYTES))
    def allocate(self, nbytes: int) -> HostBuffer | object:
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        in_use = sum(buffer.nbytes for buffer in self.held)
        before = {buffer: buffer.tensor for buffer in self.held}
        buffer = self.pool.try_allocate(nbytes)
        assert (buffer is not None) == (in_use + size <= self.limit), "what fits in sum is given"
        self.old += [old for held, old in before.items() if held.tensor is not old]
        if buffer is None:
            return multiple()
        assert buffer.nbytes == size and buffer.tensor.data_ptr() % PAGE_BYTES == 0
        assert len(buffer.view) == size and not buffer.view.readonly
        # The system's own allocator may use these addresses again where a mapping has ended.
        self.stamp = (self.stamp + 1) % POISON
        buffer.tensor.fill_(self.stamp)
        self.held[buffer] = self.stamp
        if not (in_use + size) % 3:
            self._lease(buffer)
        return buffer

    @rule(buffer=buffers)
    def lease(self, buffer: HostBuffer) -> None:
        if buffer in self.held:
            self._lease(buffer)

    def _lease(self, buffer: HostBuffer) -> None:
        self.owner.leased.add(buffer)
        self.addresses[buffer] = buffer.tensor.data_ptr()

    @rule(buffer=buffers)
    def end_lease(self, buffer: HostBuffer) -> None:
        self.owner.leased.discard(buffer)
        self.addresses.pop(buffer, None)

    @rule(buffer=consumes(buffers))
    def free(self, buffer: HostBuffer) -> None:
        self.end_lease(buffer)
        del self.held[buffer]
        self.old.append(buffer.tensor)
        self.pool.free(buffer)

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @rule()
    def pin(self) -> None:
        if not self.pinned and self.pool.stats().arenas <= 1:
            self.pinned = True
            pinned = sum(map(len, self.pool.pin(self._unpin)))
            held = sum(buffer.nbytes for buffer in self.held)
            whole = self.limit // PAGE_BYTES * PAGE_BYTES
            assert pinned == (held if self.poison else whole)

    def _unpin(self) -> None:
        assert self.pinned
        self.pinned = False

    @invariant()
    def contents_are_untouched(self) -> None:
        for buffer, stamp in self.held.items():
            assert bool((buffer.tensor == stamp).all()) and buffer.view[0] == stamp

    @invariant()
    def nobody_reads_somebody_elses_memory(self) -> None:
        if self.poison:
            assert all(bool((old == POISON).all()) for old in self.old)

    @invariant()
    def leased_buffers_stay(self) -> None:
        for buffer, address in self.addresses.items():
            assert buffer.tensor.data_ptr() == address

    @invariant()
    def figures_agree(self) -> None:
        stats, held = self.pool.stats(), sum(buffer.nbytes for buffer in self.held)
        assert self.pool.in_use_bytes == stats.in_use_bytes == held <= stats.peak_bytes
        assert held <= stats.backed_bytes == self.account.used_bytes <= self.limit
        assert stats.moves == self.owner.moves
        assert 0 <= stats.external < 1 and 0 <= stats.internal < 1
        assert stats.asked_bytes == round(held * (1 - stats.internal))

    def teardown(self) -> None:
        for buffer in list(self.held):
            self.pool.free(buffer)
        self.pool.close()
        assert not self.pinned and self.account.used_bytes == 0
        self.account.close()
        assert self.ledger.reserved_bytes(Tier.HOST) == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("announced", [True, False])
def test_what_is_charged_is_what_the_system_gives(announced: bool) -> None:
    """Also with huge pages, of which parts are punched out for buffers outside of the arena."""
    limit, size = 10 * MIB + 3 * PAGE_BYTES, 600 * 1024
    pool = pool_of(limit, (size, 4096) if announced else ())
    whole = pool.allocate(limit)
    base, length = whole.tensor.data_ptr(), limit
    pool.free(whole)
    pool.trim()

    def resident() -> int:
        apart = [b for b in held if not base <= b.tensor.data_ptr() < base + length]
        return sum(resident_pages(b.tensor.data_ptr(), b.nbytes) for b in apart) + resident_pages(
            base, length
        )

    held = [pool.allocate(4096)]
    while buffer := pool.try_allocate(size):
        buffer.tensor.fill_(1)
        held.append(buffer)
        assert resident() * PAGE_BYTES == pool.stats().backed_bytes <= limit
    for buffer in held[1::2]:
        pool.free(buffer)
    held = held[::2]
    while buffer := pool.try_allocate(1300 * 1024):  # two holes are as large, none of them is
        buffer.tensor.fill_(2)
        held.append(buffer)
        assert resident() * PAGE_BYTES == pool.stats().backed_bytes <= limit
    assert pool.stats().arenas > 2
    while held:
        pool.free(held.pop())
        assert resident() * PAGE_BYTES <= pool.stats().backed_bytes <= limit
    pool.trim()
    assert pool.stats().backed_bytes == 0 == resident_pages(base, length)


def test_half_a_charged_huge_page_is_no_huge_page() -> None:
    kib = 1024
    pool = pool_of(4 * MIB, (512 * kib, 1536 * kib, 1024 * kib))
    low, _, high, last = (pool.allocate(n * kib) for n in (512, 1536, 512, 1536))
    base = low.tensor.data_ptr()
    pool.free(low)
    pool.free(high)
    outside = pool.allocate(1024 * kib)
    assert pool.stats().arenas == 2
    pool.free(last)
    pool.trim()
    upper = pool.allocate(1024 * kib)  # the whole huge page there would pass the limit
    assert upper.tensor.data_ptr() == base + 2 * MIB
    upper.tensor.fill_(1)
    backed = resident_pages(base, 4 * MIB) + resident_pages(outside.tensor.data_ptr(), MIB)
    assert backed * PAGE_BYTES == pool.stats().backed_bytes == 3584 * kib


def test_equal_blocks_waste_nothing_and_lie_side_by_side() -> None:
    size = 149 * PAGE_BYTES
    pool = pool_of(40 * size, (size,))
    buffers = [pool.allocate(size) for _ in range(40)]
    addresses = [buffer.tensor.data_ptr() for buffer in buffers]
    assert [b - a for a, b in pairwise(addresses)] == [size] * 39
    stats = pool.stats()
    assert stats.backed_bytes == stats.asked_bytes == stats.limit_bytes
    assert stats.external == stats.internal == 0 and stats.arenas == 1
    for buffer in buffers[10:20]:
        pool.free(buffer)
    again = sorted(pool.allocate(size).tensor.data_ptr() for _ in range(10))
    assert again == addresses[10:20] and pool.stats().arenas == 1


def test_large_arenas_begin_on_a_huge_page() -> None:
    pool = pool_of(5 * MIB, (PAGE_BYTES,))
    assert pool.allocate(PAGE_BYTES).tensor.data_ptr() % (2 * MIB) == 0


def test_free_pages_come_together_when_the_owner_agrees() -> None:
    pool = pool_of(9 * PAGE_BYTES, (PAGE_BYTES,))
    owner = Leases()
    pool.owner_of(owner)
    buffers = [pool.allocate(PAGE_BYTES) for _ in range(9)]
    for number, buffer in enumerate(buffers):
        buffer.tensor.fill_(number)
    for buffer in buffers[::2]:
        pool.free(buffer)
    assert pool.stats().external == 1 - 1 / 5
    large = pool.allocate(4 * PAGE_BYTES)
    assert owner.moves == pool.stats().moves <= 2
    assert pool.stats().moved_bytes <= 2 * PAGE_BYTES and pool.stats().arenas == 1
    large.tensor.fill_(99)
    for number, buffer in enumerate(buffers):
        assert number % 2 == 0 or bool((buffer.tensor == number).all())


def test_a_pin_ends_before_pages_are_returned() -> None:
    pool = pool_of(9 * PAGE_BYTES, (PAGE_BYTES,))
    buffers = [pool.allocate(PAGE_BYTES) for _ in range(9)]
    let_go: list[int] = []
    [memory] = pool.pin(lambda: let_go.append(pool.account.used_bytes))
    assert len(memory) == 9 * PAGE_BYTES
    for buffer in buffers[::2]:
        pool.free(buffer)
    pool.trim()
    assert pool.account.used_bytes == 9 * PAGE_BYTES and not let_go, "pinned memory stays"
    pool.allocate(2 * PAGE_BYTES)  # nobody agreed to moving: it goes outside
    assert let_go == [9 * PAGE_BYTES] and pool.stats().arenas == 2
    pool.trim()
    assert pool.account.used_bytes == 6 * PAGE_BYTES


def test_what_is_poisoned_is_pinned_buffer_by_buffer() -> None:
    limit = 9 * PAGE_BYTES
    account = Ledger({Tier.HOST: limit}).open(Tier.HOST, "pool", limit)
    pool = HostPool(account, (PAGE_BYTES,), poison=True)
    buffers = [pool.allocate(PAGE_BYTES) for _ in range(3)]
    pieces = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pool.pin(lambda: None)]
    addresses = sorted((piece.data_ptr(), piece.nbytes) for piece in pieces)
    assert addresses == sorted((one.tensor.data_ptr(), one.nbytes) for one in buffers)


def test_an_error_says_what_was_asked_and_what_there_is() -> None:
    pool = pool_of(MIB)
    held = pool.allocate(768 * 1024)
    with pytest.raises(BudgetError, match=r"512 KiB do not fit; 768 KiB of 1\.00 MiB"):
        pool.allocate(512 * 1024)
    with pytest.raises(AssertionError, match="still in use"):
        pool.close()
    pool.free(held)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(held)


@pytest.mark.parametrize("sizes", [(), (MIB,)])
def test_a_system_without_memory_is_a_budget_error_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    pool = pool_of(4 * MIB, sizes)

    def refuse(*args: object, **kwargs: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        for _ in range(3):
            with pytest.raises(BudgetError, match="the system has no"):
                pool.allocate(MIB)
    assert pool.account.used_bytes == 0
    buffers = [pool.allocate(MIB) for _ in range(4)]
    for buffer in buffers:
        pool.free(buffer)
    pool.close()
    assert pool.account.used_bytes == 0


def test_a_buffer_of_its_own_reads_zeros_once_discarded() -> None:
    buffer = HostBuffer(3 * MIB)
    buffer.tensor.fill_(7)
    buffer.discard()
    assert not bool(buffer.tensor.any()) and len(buffer.view) == 3 * MIB


@pytest.mark.parametrize("limit", [3 * MIB, 300 * MIB + PAGE_BYTES])  # by one thread, by several
def test_all_memory_is_taken_at_once(limit: int) -> None:
    pool = pool_of(limit)
    asked = []
    pool.prefault(lambda: asked.append(pool.account.used_bytes))
    assert asked[-1] == pool.account.used_bytes == limit
    buffer = pool.allocate(limit)
    assert resident_pages(buffer.tensor.data_ptr(), limit) == limit // PAGE_BYTES
    pool.free(buffer)
    pool.close()
    assert pool.account.used_bytes == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_what_stays_fills_a_packed_pool_without_a_gap(pages: list[int]) -> None:
    limit = sum(pages) * PAGE_BYTES
    account = Ledger({Tier.HOST: limit}).open(Tier.HOST, "pool", limit)
    pool = HostPool(account, packed=True)
    unpinned: list[bool] = []
    pool.pin(lambda: unpinned.append(True))
    buffers = [pool.allocate(count * PAGE_BYTES) for count in pages]
    starts = [buffer.tensor.data_ptr() for buffer in buffers]
    assert starts == [starts[0] + sum(pages[:n]) * PAGE_BYTES for n in range(len(pages))]
    assert not unpinned, "none lies outside of the arena"
    for buffer in buffers:
        pool.free(buffer)
    pool.close()
