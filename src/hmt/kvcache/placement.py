"""Where pages lie: three levels, what moves between them, and what is read from which."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops
from hmt.kvcache.book import Level, Numbers, PageBook, Slots
from hmt.kvcache.cold import ColdPages
from hmt.kvcache.drive_forms import Mask
from hmt.kvcache.leaving import WrittenAhead
from hmt.kvcache.policies import AttentionDecayed, PagePolicy
from hmt.kvcache.store import PageStore, recode
from hmt.memory import Bitmap
from hmt.memory.device import Device, Mark

# Pages of a layer that lie together: pages, the layer's place in them, a table, and which of those
# that were asked for these are.
Lying = tuple[ops.Pages, int, torch.Tensor, torch.Tensor]

_NAMES = ("near", "host", "drive")  # of levels, for people
_PROMOTED = 4  # pages at a time
_MARGIN = 0.1  # of worth, below which a page stays where it is


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Hot pages that are being copied to places in host memory, until `written`."""

    ids: Numbers
    places: Numbers
    written: Mark


class Placement:
    """Pages of layers without a window at up to three levels, by worth.

    Pages are made hot.  When room is needed, those worth least move on: to host memory, and from
    there, or where that is full, to the drive, in whole groups.  Beside a device those that go next
    are copied before, while steps are computed.
    """

    def __init__(
        self,
        hot: PageStore,
        warm: PageStore | None,
        cold: ColdPages | None,
        policy: Callable[[int], PagePolicy],
        clock: Callable[[], float],
        device: Device | None = None,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        device   where hot pages are, if that has a queue for writing pages back
        """
        self.hot, self.warm, self.cold = hot, warm, cold
        slots: list[Slots] = [Bitmap(hot.count), Bitmap(warm.count if warm is not None else 0)]
        self.book = PageBook([*slots, cold.slots if cold is not None else Bitmap(0)])
        self.policy = policy(self.book.count)
        self.clock = clock
        self._device = device
        self._leaving: _Leaving | None = None
        self._made = 0  # pages at once, the last time
        self.crosses = warm is not None and hot.crosses_to(warm)  # kernels know the way
        self.account = KVAccount({_NAMES[n]: s.count for n, s in enumerate(self.book.levels)})
        self._ahead = None
        if cold is not None:
            self._ahead = WrittenAhead(self.book, cold, self.account, self._note_moved)

    @property
    def free_pages(self) -> int:
        """That can be made, over all levels."""
        free = sum(self.book.free_at(level) for level in Level)
        return free + (0 if self._ahead is None else self._ahead.pages)

    @property
    def drive_has_room(self) -> bool:
        """Whether pages may go to the drive."""
        ahead = self._ahead is not None and self._ahead.pages > 0
        return ahead or self.book.free_at(Level.COLD) >= GROUP_PAGES

    @property
    def keeps_low(self) -> bool:
        """Whether pages of little attention are kept in fewer bytes on the drive."""
        return self.cold is not None and self.cold.low is not None

    def new(self, count: int, stays: Iterable[Numbers]) -> Numbers:
        """`count` hot pages; none of `stays` moves away to make room for them."""
        self._make_room(count, stays)
        self._made = count
        made = self.book.new(count)
        self.policy.added(made, self.clock())
        self._note_levels()
        return made

    def write_back(self, wanted: int, stays: Callable[[], Iterable[Numbers]]) -> None:
        """Between steps: let pages that were copied to host memory go, and begin to copy others.

        As many as are short of `wanted` hot pages that will be made, at most a group at a time.
        From host memory pages are copied to the drive.
        """
        self._write_ahead(wanted, stays)
        if self._leaving is not None and self._leaving.written.reached():
            self.settle()
        room = min(GROUP_PAGES, self.book.free_at(Level.WARM))
        wanted = min(wanted, GROUP_PAGES)
        if self._leaving is not None or not room or self.book.free_at(Level.HOT) >= wanted:
            return
        device, warm = self._device, self.warm
        if device is None or warm is None:
            return
        if self.hot.device.type != "cpu" and not self.crosses:
            return  # what the CPU has to encode, it encodes when it must
        movable = self._movable(stays())
        ids = self._least(movable, len(movable), Level.HOT)[:room]
        if not len(ids):
            return
        places = self.book.reserve(len(ids), Level.WARM)
        self.book.share(ids)  # whoever gives them up meanwhile does not free them
        slots, theirs = to_tensor(places), to_tensor(self.book.slots_of(ids))

        def work() -> None:
            if self.crosses:
                self.hot.send(theirs, warm, slots)
            else:
                warm.take(slots, self.hot, theirs)

        self._leaving = _Leaving(ids, places, device.write_back(work))

    def _write_ahead(self, wanted: int, stays: Callable[[], Iterable[Numbers]]) -> None:
        """Begin to write pages to the drive, if `wanted` others will take their room."""
        if self._ahead is None:
            return
        if self._ahead.pages:
            self._ahead.forget(np.concatenate([*stays()]))
        level = Level.HOT if self.warm is None or self.warm.count < GROUP_PAGES else Level.WARM
        source = self.hot if level is Level.HOT else self.warm
        assert source is not None
        if not self._ahead.works or source.device.type != "cpu":
            return
        if self.keeps_low and level is Level.HOT:
            return  # asked as late as can be which they are: 60 of 64 answers instead of 54
        # Enough for the next two steps: what more are worth is not known yet.
        ready = self.book.free_at(Level.HOT) + self.book.free_at(Level.WARM) + self._ahead.pages
        short = min(wanted, max(GROUP_PAGES, 2 * self._made)) - ready
        ids = self._movable(stays()) if level is Level.HOT else self.book.at(Level.WARM)
        ids = np.setdiff1d(ids, self._ahead.ids)
        groups = min(-(-short // GROUP_PAGES), len(ids) // GROUP_PAGES)
        groups = min(groups, self.book.free_at(Level.COLD) // GROUP_PAGES)
        if groups > 0:
            for group in np.split(self._least(ids, groups * GROUP_PAGES, level), groups):
                self._ahead.begin(group, source, self._low(group))

    def settle(self) -> None:
        """Wait for pages that are being copied, and let them go."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        leaving.written.wait()
        self.book.move(leaving.ids, Level.WARM, leaving.places)
        self._note_moved(leaving.ids, Level.HOT, Level.WARM)
        self.book.drop(leaving.ids)

    def copy(self, page: Numbers, hot_copy: Numbers) -> None:
        """Let hot page `hot_copy` hold what `page` holds, wherever that is."""
        number = to_tensor(self.book.slots_of(hot_copy)).to(self.hot.device)
        for layer, kept in self.hot.layers.items():
            for pages, slot, table, _ in self.lying(layer, page):
                recode(kept.pages, kept.slot, number, pages, slot, table)

    def lying(self, layer: int, ids: Numbers) -> Iterator[Lying]:
        """Where pages `ids` of `layer` lie; those of the drive some at a time."""
        levels, slots = self.book.level_of(ids), self.book.slots_of(ids)
        for level, store in ((Level.HOT, self.hot), (Level.WARM, self.warm)):
            if store is not None and len(at := np.flatnonzero(levels == level)):
                kept, table = store.layers[layer], to_tensor(slots[at])
                yield kept.pages, kept.slot, table.to(store.device), to_tensor(at)
        if self.cold is not None and len(at := np.flatnonzero(levels == Level.COLD)):
            for pages, [(entries, table)] in self.cold.pieces(layer, [slots[at]]):
                if len(table):
                    yield pages, 0, table, to_tensor(at[entries])

    def promote(self, stays: Iterable[Numbers]) -> None:
        """Let some pages of host memory change places with hot ones that are worth less."""
        self.settle()
        warm = self._staying(self.book.at(Level.WARM))
        if self.warm is None or not len(warm) or self.book.free_at(Level.WARM) < _PROMOTED:
            return
        now = self.clock()
        best = self._least(warm, len(warm), Level.WARM)[-_PROMOTED:][::-1]
        worst = self._least(self._movable(stays), len(best), Level.HOT)
        best = best[: len(worst)]
        gain = self.policy.worth(best, now, 1.0) - self.policy.worth(worst, now, 1.0)
        count = int((gain > _MARGIN).sum())
        if count:
            self._move(worst[:count], Level.WARM)
            self._move(best[:count], Level.HOT)

    def release(self) -> None:
        """Give all memory back."""
        self.settle()
        if self._ahead is not None:
            self._ahead.close()
        self.hot.release()
        if self.warm is not None:
            self.warm.release()
        if self.cold is not None:
            self.cold.close()

    def _make_room(self, pages: int, stays: Iterable[Numbers]) -> None:
        """Move hot pages away until `pages` are free."""
        if pages > self.book.free_at(Level.HOT):
            self.settle()
            if self._ahead is not None:
                self._ahead.land(Level.HOT, pages)
        short = pages - self.book.free_at(Level.HOT)
        if short <= 0:
            return
        movable = self._movable(stays)
        # Some more at once: each move costs calls for all layers, however few pages it is of.
        batch = min(max(short, GROUP_PAGES), len(movable))
        room = self.book.free_at(Level.WARM)
        if room < short and self.warm is not None and self._ahead is not None:
            self._ahead.land(Level.WARM, short)
            room = self.book.free_at(Level.WARM)
            aside = self._staying(self.book.at(Level.WARM))
            count = min(len(aside), self.book.free_at(Level.COLD), _whole_groups(short - room))
            if count := count // GROUP_PAGES * GROUP_PAGES:
                self._move(self._least(aside, count, Level.WARM), Level.COLD)
            room = self.book.free_at(Level.WARM)
        least = self._least(movable, len(movable), Level.HOT)
        to_warm = min(batch, room)
        if to_warm:
            self._move(least[:to_warm], Level.WARM)
        if to_warm < short:
            count = min(_whole_groups(short - to_warm), self.book.free_at(Level.COLD))
            self._move(least[to_warm : to_warm + count], Level.COLD)
        assert self.book.free_at(Level.HOT) >= pages, "capacity was reserved"

    def _movable(self, stays: Iterable[Numbers]) -> Numbers:
        return self._staying(np.setdiff1d(self.book.at(Level.HOT), np.concatenate([*stays])))

    def _staying(self, ids: Numbers) -> Numbers:
        """Those that do not have a place on the drive already."""
        return ids if self._ahead is None else np.setdiff1d(ids, self._ahead.ids)

    def _least(self, ids: Numbers, count: int, level: Level) -> Numbers:
        """Those worth least, the least first."""
        slots = self.book.levels[level]
        pressure = 1 - slots.free / max(1, slots.count)
        worth = self.policy.worth(ids, self.clock(), pressure)
        return ids[np.argsort(worth, kind="stable")[:count]]

    def _move(self, ids: Numbers, level: Level) -> None:
        """Move pages, all at one level, to another."""
        came = Level(int(self.book.level_of(ids[:1])[0]))
        source = self.hot if came is Level.HOT else self.warm
        assert source is not None
        if level is Level.COLD:
            self._write(ids, source)
        else:
            target = self.hot if level is Level.HOT else self.warm
            assert target is not None
            old, new = self.book.move(ids, level)
            theirs = to_tensor(old).to(source.device)
            target.take(to_tensor(new).to(target.device), source, theirs)
        self._note_moved(ids, came, level)

    def held(self) -> dict[str, int]:
        """Pages that are taken now, by level."""
        return {_NAMES[n]: s.count - s.free for n, s in enumerate(self.book.levels)}

    def _write(self, ids: Numbers, source: PageStore) -> None:
        """Move pages to the drive now; if that fails they stay where they are."""
        assert self.cold is not None and self._ahead is not None
        begin, low = time.perf_counter(), self._low(ids)
        places = self.book.reserve(len(ids), Level.COLD)
        try:
            self.cold.write(places, source, self.book.slots_of(ids), low).result()
        except BaseException:
            self.book.levels[Level.COLD].give(places.tolist())
            raise
        finally:
            self.account.stalled_s += time.perf_counter() - begin
        self._ahead.works = True
        self.book.move(ids, Level.COLD, places)
        self.account.low_pages += 0 if low is None else int(low.sum())

    def _low(self, ids: Numbers) -> Mask | None:
        """Which pages that go to the drive are of so little attention that fewer bytes do."""
        if self.cold is None or self.cold.low is None:
            return None
        assert isinstance(self.policy, AttentionDecayed)
        low: Mask = self.policy.scores(ids, self.clock()) < self.cold.low.below
        return low

    def _note_moved(self, ids: Numbers, came: Level, level: Level) -> None:
        way = f"{_NAMES[came]} to {_NAMES[level]}"
        self.account.moved[way] = self.account.moved.get(way, 0) + len(ids)
        self._note_levels()

    def _note_levels(self) -> None:
        for name, used in self.held().items():
            self.account.most[name] = max(self.account.most.get(name, 0), used)


def to_tensor(numbers: Numbers) -> torch.Tensor:
    """The same numbers, int64."""
    return torch.from_numpy(np.ascontiguousarray(numbers))


def pages_of(tokens: int) -> int:
    """Pages that so many positions take."""
    return -(-tokens // PAGE_TOKENS)


def _whole_groups(pages: int) -> int:
    return -(-pages // GROUP_PAGES) * GROUP_PAGES
