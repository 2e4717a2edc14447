"""Looking at the engine for everybody who watches, and what happened between two looks."""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Final, Protocol

import numpy as np

from hmt.base.errors import ClosedError
from hmt.contracts.plan import Tier
from hmt.engine import Bottleneck, EngineSnapshot, ExpertMap, LoadedModel, Phase, bottleneck
from hmt.server.concurrency_limit import ConcurrencyLimit
from hmt.server.page import state

_APART_S: Final = 0.5  # between looks, however many watch
_LIMIT_S: Final = 5.0  # of steps that the bottleneck is of: that of one second jumps about
_PATIENCE_S: Final = 1.0  # that somebody waits for the step that runs
_LETTERS: Final = np.array(list("gmcd"))  # by Place


class ServedModel(Protocol):
    """What is told of a model besides its engine's part: a `Service` has it."""

    name: str
    limit: ConcurrencyLimit

    @property
    def max_positions(self) -> int:
        """The longest that prompt and answer may be together."""
        ...


class KnownModels(Protocol):
    """What is told of a server's models: a `ModelManager` has it."""

    @property
    def services(self) -> Mapping[str, Any]:
        """Those that are loaded, by name."""
        ...

    @property
    def loadable(self) -> Collection[str]:
        """The names of those that may be loaded."""
        ...

    @property
    def loading(self) -> Mapping[str, float]:
        """The share that has been read of those that are loaded now."""
        ...


class SnapshotCache:
    """The last looks at one model, shared by all who ask; for one event loop."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._reading: Future[EngineSnapshot] | None = None
        # The last ones: two at least, where there were.
        self._snapshots: deque[EngineSnapshot] = deque()
        self._limit: tuple[Bottleneck, EngineSnapshot] | None = None

    async def see(self, service: ServedModel, models: KnownModels) -> state.State:
        """What there is to tell.

        The engine's part is as of a moment ago, or, while a step takes long, of the last time.
        """
        await self._read()
        model, load, limit = self._model, self._model.load, service.limit
        spec = model.prepared.model.spec
        return state.State(
            state.Model(
                service.name,
                spec.architecture,
                spec.layers,
                model.prepared.published_bytes,
                service.max_positions,
                model.images_refused,
            ),
            state.Requests(load.running, load.waiting, limit.inside, limit.running, limit.waiting),
            self._engine() if self._snapshots else None,
            list(models.services),
            [name for name in models.loadable if name not in models.services],
            dict(models.loading),
        )

    async def _read(self) -> None:
        if self._snapshots and time.perf_counter() - self._snapshots[-1].at_s < _APART_S:
            return
        try:
            if self._reading is None:
                self._reading = self._model.begin_snapshot()
            reading = self._reading
            snapshot = await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(reading)), _PATIENCE_S
            )
        except (ClosedError, TimeoutError):
            return
        if reading is self._reading:  # others waited for it as well
            self._reading = None
            self._snapshots.append(snapshot)
            while len(self._snapshots) > 2 and snapshot.at_s - self._snapshots[1].at_s > _LIMIT_S:
                self._snapshots.popleft()
            self._note_limit(snapshot)

    def _note_limit(self, snapshot: EngineSnapshot) -> None:
        before = self._snapshots[0] if len(self._snapshots) > 1 else None
        done = [_since(snapshot, before, name) for name in ("generation", "prompt")]
        phase = next((phase for phase in done if phase.tokens), None)
        found = None if phase is None else bottleneck(phase, snapshot.summary.machine)
        if found is not None:
            self._limit = found, snapshot

    def _engine(self) -> state.Engine:
        now = self._snapshots[-1]
        before = self._snapshots[-2] if len(self._snapshots) > 1 else now
        window_s = now.at_s - before.at_s
        prompt, generation = (_since(now, before, n) for n in ("prompt", "generation"))
        summary, per = now.summary, 1 / window_s if window_s else 0.0
        totals, kv = (summary.prompt, summary.generation), summary.kv
        seconds = prompt.seconds + generation.seconds
        waited_s, device_s = (
            getattr(prompt, name) + getattr(generation, name) for name in ("waited_s", "device_s")
        )
        # Steps that end in a window may have begun before it.
        share = min(1.0, seconds * per) / seconds if seconds else 0.0
        machine, guesses = summary.machine, summary.speculation
        gpu = "" if machine.device is None else machine.device.name
        return state.Engine(
            age_s=time.perf_counter() - now.at_s,
            window_s=window_s,
            machine=state.Machine(machine.name, machine.cores, gpu, summary.peak_rss_bytes),
            tokens=state.Tokens(
                summary.prompt.tokens,
                summary.generation.tokens,
                prompt.tokens * per,
                generation.tokens * per,
            ),
            time=state.Time(
                max(0.0, seconds - waited_s - device_s) * share, waited_s * share, device_s * share
            ),
            tiers=[
                state.Tier(tier.value, **asdict(now.fills[tier]))
                for tier in Tier
                if tier in now.fills
            ],
            links=_links(now, prompt, generation, per),
            kv=state.Keys(
                now.load.capacity_tokens,
                now.load.free_tokens,
                {} if kv is None else kv.capacity,
                {} if kv is None else kv.used,
            ),
            reads=state.Reads(
                *(sum(getattr(one, n) for one in totals) for n in ("hits", "pending", "misses"))
            ),
            prefixes=summary.prefixes,
            speculation=state.Speculation(
                guesses.steps, guesses.tokens, guesses.proposed, guesses.accepted
            ),
            experts=None if now.experts is None else _experts(now.experts),
            bottleneck=self._limit_of(now),
        )

    def _limit_of(self, now: EngineSnapshot) -> state.Limit | None:
        if self._limit is None:
            return None
        found, snapshot = self._limit
        return state.Limit(found.link, found.rate, found.ceiling, found.text, snapshot is now)


def _since(now: EngineSnapshot, before: EngineSnapshot | None, name: str) -> Phase:
    """What one phase has had since the snapshot before."""
    phase: Phase = getattr(now.summary, name)
    return phase if before is None else phase.since(getattr(before.summary, name))


def _links(now: EngineSnapshot, prompt: Phase, generation: Phase, per: float) -> list[state.Link]:
    summary, machine = now.summary, now.summary.machine

    def link(source: str, target: str, name: str, ceiling: float) -> state.Link:
        field = f"{name}_bytes"
        total = getattr(summary.prompt, field) + getattr(summary.generation, field)
        moved = getattr(prompt, field) + getattr(generation, field)
        return state.Link(source, target, total, moved * per, ceiling)

    links = [link("disk", "host", "disk", machine.disk_read_rate)] if Tier.DISK in now.fills else []
    links.append(link("host", "cpu", "host", machine.cpu.read_rate))
    if summary.device is not None and machine.device is not None:
        links.append(link("host", "device", "link", machine.device.link_rate))
    return links


def _experts(experts: ExpertMap) -> state.Experts:
    percent = np.rint(experts.heat * 100).astype(int)
    places = ["".join(_LETTERS[row]) for row in experts.places]
    heat = [
        row.tolist() if told else None for row, told in zip(percent, experts.counted, strict=True)
    ]
    return state.Experts(list(experts.layers), places, heat)
