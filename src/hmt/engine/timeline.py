"""Timelines of a run in a file that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events ("ph": "X") with microseconds, on
threads that stand for tracks here.  What overlaps lies on tracks of its own.
"""

import gzip
import heapq
import json
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from hmt.base.locked_file import open_locked
from hmt.base.trace import Event, Tracer
from hmt.contracts.store import Priority

TRACED_EVENTS = 1_000_000  # the last ones; about ten minutes at a disk's full rate

# From top to bottom, by the kind of event.
_TRACKS = {
    "step": "steps",
    "compute": "layers, with their waits",
    "wait": "waiting",
    "read": "disk",
    "verify": "checksums",
    "convert": "conversion",
}
_LANES = 1000  # numbers for the threads of one track: more than anything does at a time
_PRIORITIES = {
    Priority.DEMAND: "needed",
    Priority.PREFETCH: "ahead",
    Priority.SPECULATIVE: "guessed",
}


class Timeline:
    """A file for one run's events.  Empty until they are written."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where it cannot be written, or another model writes it."""
        self._raw = open_locked(path, "the timeline")
        self._packed = path.suffix == ".gz"

    def write(self, events: Sequence[Event]) -> None:
        """Write them all.  Does nothing when the file is closed."""
        if not self._raw.closed:
            content = json.dumps(chrome_trace(events), separators=(",", ":")).encode()
            self._raw.write(gzip.compress(content, mtime=0) if self._packed else content)

    def close(self) -> None:
        """Let go of the file.  Does nothing twice."""
        self._raw.close()


def tracer_for(timeline: Timeline | None) -> Tracer:
    """A tracer that keeps what the timeline will show; None: nothing.

    Events that no file will hold would fill 13 MiB of a server over its first hours.
    """
    return Tracer(0 if timeline is None else TRACED_EVENTS)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The content of a trace file.  Its times count from the first event's begin."""
    zero = min((event.begin_s for event in events), default=0.0)
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "HMT"}}
    ]
    for number, (kind, track) in enumerate(_TRACKS.items()):
        own = sorted((e for e in events if e.kind == kind), key=attrgetter("begin_s"))
        lanes = set()
        for event, lane in _lanes(own):
            thread = number * _LANES + lane
            lanes.add(lane)
            found.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": thread,
                    "cat": event.kind,
                    "name": _name(event),
                    "ts": round((event.begin_s - zero) * 1e6, 3),
                    "dur": round((event.end_s - event.begin_s) * 1e6, 3),
                    "args": {"bytes": event.nbytes} if event.nbytes else {},
                }
            )
        for lane in lanes:
            named = {"ph": "M", "pid": 1, "tid": number * _LANES + lane}
            name = track if len(lanes) == 1 else f"{track} {lane + 1}"
            found.append(named | {"name": "thread_name", "args": {"name": name}})
            order = {"sort_index": number * _LANES + lane}
            found.append(named | {"name": "thread_sort_index", "args": order})
    return {"displayTimeUnit": "ms", "traceEvents": found}


def _lanes(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Each of the events, which ascend by begin, with the first lane that is free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # until when, which lane
    for event in events:
        while busy and busy[0][0] <= event.begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (event.end_s, lane))
        yield event, lane


def _name(event: Event) -> str:
    match event.what:
        case (int(prompt), int(decoded)):
            counts = ((prompt, "prompt tokens"), (decoded, "decoded"))
            return ", ".join(f"{count} {what}" for count, what in counts if count)
        case (str(file), int(offset), Priority() as priority):
            return f"{_PRIORITIES[priority]}: {file} at {offset}"
        case what:
            return str(what) or event.kind
