"""A paged KV cache over several memories: near pages in full, far ones in fewer bits or on disk.

Attention goes to where the pages are, and its parts merge exactly.  Which pages move away is the
policy's to say; none is ever lost.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hmt.base.errors import BudgetError
from hmt.contracts.kv import GROUP_PAGES, Stay, least_hot_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Run, Step
from hmt.kernels import ops
from hmt.kvcache.book import Level, Numbers, PageBook, Slots
from hmt.kvcache.cold import ColdPages
from hmt.kvcache.merging import Merged
from hmt.kvcache.policies import PagePolicy
from hmt.kvcache.rings import Rings
from hmt.kvcache.store import Kept, PageStore, recode
from hmt.memory import Bitmap

_STAY = Stay()
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Sequence:
    """pages: those that were made, by position; unmade: how many more it may have."""

    pages: Numbers
    unmade: int


@dataclass(slots=True)
class Traffic:
    """Pages that moved between levels, by (from, to)."""

    moved: dict[tuple[Level, Level], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Where:
    """A step's runs by level; cold: with places instead of tables."""

    hot: ops.PagedRuns
    warm: ops.PagedRuns | None = None
    cold: tuple[tuple[Run, Numbers], ...] = ()


class TieredKV:
    """KVCache whose pages lie at up to three levels.

    A sequence's pages are made as it grows, hot, and move away when others need the room: least
    worth first, but never its first pages nor its last.  Layers with a sliding window keep rings of
    their own, which are always hot.  Capacity is reserved when a sequence is opened, over all
    levels: a request that was admitted can always finish.
    """

    def __init__(
        self,
        hot: PageStore,
        warm: PageStore | None,
        cold: ColdPages | None,
        rings: Sequence[Rings],
        policy: Callable[[int], PagePolicy],
        *,
        chunk: int,
        stay: Stay = _STAY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        hot     pages of all layers without a window, `least_hot_pages` of one sequence at least
        chunk   tokens that a step may append, all but one of each sequence
        """
        assert hot.count >= least_hot_pages(chunk, 1, stay)
        self._hot, self._warm, self._cold = hot, warm, cold
        self._rings = {index: rings for rings in rings for index in rings.layers}
        self._windows = tuple(rings)
        slots: list[Slots] = [Bitmap(hot.count), Bitmap(warm.count if warm is not None else 0)]
        self._book = PageBook([*slots, cold.slots if cold is not None else Bitmap(0)])
        self._policy = policy(self._book.count)
        self._stay = stay
        self._clock = clock
        self._chunk = chunk
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._step: Step | None = None
        self._where = _Where(ops.PagedRuns(()))
        self.traffic = Traffic()

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self._book.count * PAGE_TOKENS

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._free_pages(_NONE) * PAGE_TOKENS

    def can_open(self, tokens: int) -> bool:
        """Whether `open` would succeed now."""
        return self._has_room(_NONE, _pages_of(tokens))

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        return self._open(_NONE, _pages_of(tokens))

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        """A new sequence with the first `held` positions of another, and room for `tokens` in all.

        Whole pages are shared.  The last one, if it is not full, is copied at once: each of the two
        writes to it next.  Where layers have a window, `held` has to be all that the other holds:
        what they saw before is gone.  Raises BudgetError.
        """
        whole = held // PAGE_TOKENS
        theirs = self._sequences[sequence].pages
        forked = self._open(theirs[:whole].copy(), _pages_of(tokens) - whole)
        self._book.share(theirs[:whole])
        for rings in self._windows:
            rings.copy(sequence, forked)
        if held % PAGE_TOKENS:
            self._grow({forked: 1, sequence: 0})
            copy = self._sequences[forked].pages[-1:]
            self._copy_to_hot(theirs[whole : whole + 1], copy)
        return forked

    def close(self, sequence: int) -> None:
        """Free a sequence's pages."""
        self._book.drop(self._sequences.pop(sequence).pages)
        for rings in self._windows:
            rings.close(sequence)

    def release(self) -> None:
        """Give all memory back.  The cache cannot be used afterwards."""
        for part in (self._hot, self._warm, *self._windows):
            if part is not None:
                part.release()
        if self._cold is not None:
            self._cold.close()

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        if rings := self._rings.get(layer):
            kept, runs = rings.layers[layer], rings.runs_of(step)
        else:
            kept, runs = self._hot.layers[layer], self._where_is(step).hot
        ops.append_pages(kept.pages, kept.slot, runs, key, value)

    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KVCache."""
        options: dict[str, Any] = {"scale": scale, "softcap": softcap}
        if rings := self._rings.get(layer):
            kept, runs = rings.layers[layer], rings.runs_of(step)
            options |= {"window": kept.window, "sinks": sinks}
            return ops.paged_attention_output(kept.pages, kept.slot, runs, query, **options)
        kept, where = self._hot.layers[layer], self._where_is(step)
        if where.warm is None and not where.cold:
            options["sinks"] = sinks
            return ops.paged_attention_output(kept.pages, kept.slot, where.hot, query, **options)
        shape = *query.shape[:2], kept.pages.layout.value_dim
        merged = Merged(shape, query.device)
        ops.attend_part(
            kept.pages, kept.slot, where.hot, query, merged.out, merged.lse, sinks=sinks, **options
        )
        for pages, slot, runs in self._elsewhere(layer, where):
            part = merged.like()
            ops.attend_part(pages, slot, runs, query, part.out, part.lse, **options)
            merged.add(part)
        return merged.out.to(query.dtype)

    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """See KVCache."""
        kept = self._kept_of(layer)
        kv_heads = kept.pages.layout.heads
        query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        self.append(layer, step, key, value)
        return self.attend(layer, step, query, **options).flatten(1)

    def kernel_pages(self, layer: int) -> None:
        """See KVCache: pages are in several places."""

    def kernel_runs(self, step: Step) -> Any:
        """See KVCache."""
        raise AssertionError("kernel_pages said no")

    def read(self, layer: int, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        if rings := self._rings.get(layer):
            kept, table = rings.layers[layer], rings.table(run.sequence, run.context)
            return ops.read_pages(kept.pages, kept.slot, table, run.context)
        layout = self._hot.layers[layer].pages.layout
        ids = self._sequences[run.sequence].pages[: _pages_of(run.context)]
        shape = len(ids), PAGE_TOKENS, layout.heads
        dtype, device = layout.encoding.dtype, self._hot.device
        key = torch.empty(*shape, layout.key_dim, dtype=dtype, device=device)
        value = key[..., : layout.value_dim]
        if not layout.latent:
            value = torch.empty(*shape, layout.value_dim, dtype=dtype, device=device)
        for pages, slot, table, at in self._lying(layer, ids):
            rows = ops.read_pages(pages, slot, table, PAGE_TOKENS * len(table))
            key[at] = rows[0].unflatten(0, (-1, PAGE_TOKENS)).to(key)
            if not layout.latent:
                value[at] = rows[1].unflatten(0, (-1, PAGE_TOKENS)).to(value)
        return key.flatten(0, 1)[: run.context], value.flatten(0, 1)[: run.context]

    def _kept_of(self, layer: int) -> Kept:
        rings = self._rings.get(layer)
        return (rings.layers if rings else self._hot.layers)[layer]

    def _lying(
        self, layer: int, ids: Numbers
    ) -> Iterator[tuple[ops.Pages, int, torch.Tensor, torch.Tensor]]:
        """Where pages `ids` of `layer` lie: (pages, layer in them, table, which of `ids`)."""
        levels, slots = self._book.level_of(ids), self._book.slots_of(ids)
        for level, store in ((Level.HOT, self._hot), (Level.WARM, self._warm)):
            if store is not None and len(at := np.flatnonzero(levels == level)):
                kept = store.layers[layer]
                yield kept.pages, kept.slot, _tensor(slots[at]), _tensor(at)
        if self._cold is not None and len(at := np.flatnonzero(levels == Level.COLD)):
            for pages, [(entries, table)] in self._cold.pieces(layer, [slots[at]]):
                yield pages, 0, table, _tensor(at[entries])

    def _elsewhere(
        self, layer: int, where: _Where
    ) -> Iterator[tuple[ops.Pages, int, ops.PagedRuns]]:
        """Pages of a step's runs that are not hot: (pages, layer in them, runs)."""
        if where.warm is not None and self._warm is not None:
            kept = self._warm.layers[layer]
            yield kept.pages, kept.slot, where.warm
        if where.cold and self._cold is not None:
            tables = [slots for _, slots in where.cold]
            for pages, found in self._cold.pieces(layer, tables):
                runs = [
                    _over(run, table)
                    for (run, _), (_, table) in zip(where.cold, found, strict=True)
                    if len(table)
                ]
                yield pages, 0, ops.PagedRuns(runs)

    def _where_is(self, step: Step) -> _Where:
        """The step's runs by level; makes the pages that it appends to, first."""
        if self._step is not step:
            counts = {}
            for run in step.runs:
                held = self._sequences[run.sequence].pages
                counts[run.sequence] = _pages_of(run.context) - len(held)
            self._grow(counts)
            self._where = self._places_of(step)
            self._step = step
        return self._where

    def _places_of(self, step: Step) -> _Where:
        hot, warm, cold = [], [], []
        for run in step.runs:
            ids = self._sequences[run.sequence].pages[: _pages_of(run.context)]
            levels, slots = self._book.level_of(ids), self._book.slots_of(ids)
            near = levels == Level.HOT
            # What is elsewhere comes before the run's own tokens: without it they stand earlier.
            start = run.start - PAGE_TOKENS * int(len(ids) - near.sum())
            table = _tensor(slots[near]).to(self._hot.device)
            hot.append(ops.PagedRun(run.offset, run.length, start, table))
            if len(there := slots[levels == Level.WARM]):
                warm.append(_over(run, _tensor(there)))
            if len(there := slots[levels == Level.COLD]):
                cold.append((run, there))
        return _Where(ops.PagedRuns(hot), ops.PagedRuns(warm) if warm else None, tuple(cold))

    def _grow(self, counts: Mapping[int, int]) -> None:
        """Make pages for sequences, hot; none of theirs that is still written to moves away."""
        wanted = sum(count for count in counts.values() if count > 0)
        if not wanted:
            return
        self._make_room(wanted)
        now = self._clock()
        for number, count in counts.items():
            if count <= 0:
                continue
            sequence = self._sequences[number]
            assert count <= sequence.unmade, "more positions than were reserved"
            made = self._book.new(count)
            self._policy.added(made, now)
            sequence.pages = np.concatenate((sequence.pages, made))
            sequence.unmade -= count

    def _make_room(self, pages: int) -> None:
        """Move hot pages away until `pages` are free."""
        short = pages - self._book.free_at(Level.HOT)
        if short <= 0:
            return
        movable = self._movable()
        # Some more at once: each move costs calls for all layers, however few pages it is of.
        batch = min(max(short, GROUP_PAGES), len(movable))
        room = self._book.free_at(Level.WARM)
        if room < batch and self._warm is not None and self._cold is not None:
            aside = self._book.at(Level.WARM)
            count = min(len(aside), self._book.free_at(Level.COLD), _whole_groups(batch - room))
            if count := count // GROUP_PAGES * GROUP_PAGES:
                self._move(self._least(aside, count, Level.WARM), Level.COLD)
            room = self._book.free_at(Level.WARM)
        least = self._least(movable, len(movable), Level.HOT)
        to_warm = min(batch, room)
        if to_warm:
            self._move(least[:to_warm], Level.WARM)
        if to_warm < short:
            count = min(_whole_groups(short - to_warm), self._book.free_at(Level.COLD))
            self._move(least[to_warm : to_warm + count], Level.COLD)
        assert self._book.free_at(Level.HOT) >= pages, "capacity was reserved"

    def _movable(self) -> Numbers:
        """Hot pages that may go: neither a sequence's first nor its last."""
        stays = [_NONE]
        for sequence in self._sequences.values():
            stays += [sequence.pages[: self._stay.sinks], sequence.pages[-self._stay.recent :]]
        return np.setdiff1d(self._book.at(Level.HOT), np.concatenate(stays))

    def _least(self, ids: Numbers, count: int, level: Level) -> Numbers:
        """Those worth least, the least first."""
        held = len(self._book.at(level))
        pressure = held / max(1, held + self._book.free_at(level))
        worth = self._policy.worth(ids, self._clock(), pressure)
        return ids[np.argsort(worth, kind="stable")[:count]]

    def _move(self, ids: Numbers, level: Level) -> None:
        """Move pages, all at one level, to another."""
        came = Level(int(self._book.level_of(ids[:1])[0]))
        source = self._hot if came is Level.HOT else self._warm
        assert source is not None
        old, new = self._book.move(ids, level)
        if level is Level.WARM:
            assert self._warm is not None
            self._warm.take(_tensor(new), source, _tensor(old).to(source.device))
        else:
            assert self._cold is not None
            self._cold.take(new, source, _tensor(old).to(source.device))
        key = came, level
        self.traffic.moved[key] = self.traffic.moved.get(key, 0) + len(ids)

    def _copy_to_hot(self, page: Numbers, copy: Numbers) -> None:
        """Let hot page `copy` hold what `page` holds, wherever that is."""
        number = _tensor(self._book.slots_of(copy)).to(self._hot.device)
        for layer, kept in self._hot.layers.items():
            for pages, slot, table, _ in self._lying(layer, page):
                recode(kept.pages, kept.slot, number, pages, slot, table)

    def _free_pages(self, held: Numbers) -> int:
        """Pages that no sequence has reserved, once somebody holds `held`."""
        free = sum(self._book.free_at(level) for level in Level)
        return free - sum(s.unmade for s in self._sequences.values())

    def _has_room(self, held: Numbers, unmade: int) -> bool:
        """For one more sequence of pages `held`, and so many that are to be made."""
        least = least_hot_pages(self._chunk, len(self._sequences) + 1, self._stay)
        enough = unmade <= self._free_pages(held) and least <= self._hot.count
        return enough and all(rings.can_open(len(held) + unmade) for rings in self._windows)

    def _open(self, held: Numbers, unmade: int) -> int:
        pages = len(held) + unmade
        if not self._has_room(held, unmade):
            raise BudgetError(
                f"{unmade * PAGE_TOKENS} positions of KV were asked for and {self.free_tokens} of "
                f"{self.capacity_tokens} are free, {self._hot.count * PAGE_TOKENS} of them near, "
                f"with {len(self._sequences)} sequences open; ask for a shorter context, or raise "
                "--kv-device-memory, --kv-host-memory or --kv-disk-memory"
            )
        self._next += 1
        self._sequences[self._next] = _Sequence(held, unmade)
        for rings in self._windows:
            rings.open(self._next, pages)
        return self._next


def _over(run: Run, table: torch.Tensor) -> ops.PagedRun:
    """A run's tokens over whole pages of its past, all of which they see."""
    seen = PAGE_TOKENS * len(table)
    return ops.PagedRun(run.offset, run.length, seen, table, seen)


def _pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def _whole_groups(pages: int) -> int:
    return -(-pages // GROUP_PAGES) * GROUP_PAGES


def _tensor(numbers: Numbers) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers))
