"""What a server holds while nobody asks anything, and whether that grows."""

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from hmt.base.errors import HMTError

_PATIENCE_S: Final = 60.0
_GROWTH: Final = 0.02  # of the resident bytes, which is what allocators do by themselves
_LEAST_GROWTH_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class IdleState:
    """A server at rest.

    pages     of keys and values that are not free
    inside    answers under way
    """

    at_s: float
    requests: int
    rss_bytes: int
    threads: int
    descriptors: int
    pages: int
    inside: int


async def idle_state(
    pid: int, http: httpx2.AsyncClient, begin_s: float, requests: int
) -> IdleState:
    """Once nothing is under way, or after a minute as it is then."""
    process, end = psutil.Process(pid), time.monotonic() + _PATIENCE_S
    while True:
        measured = (await http.get("/metrics")).text
        pages = _total(measured, "hmt_kv_pages", state="reserved")
        inside = _total(measured, "hmt_answers_inside")
        descriptors = process.num_fds()
        if (not pages and not inside and not _connections(process)) or time.monotonic() > end:
            return IdleState(
                at_s=time.monotonic() - begin_s,
                requests=requests,
                rss_bytes=process.memory_info().rss,
                threads=process.num_threads(),
                descriptors=descriptors,
                pages=pages,
                inside=inside,
            )
        await asyncio.sleep(0.1)


def judge_growth(rests: list[IdleState]) -> dict[str, Any]:
    """What grew since the first third of all rests, when everything had happened.

    Of resident bytes, which go up and down with models that are loaded, the median of the last
    third beside that of the first; of threads and descriptors, of which some come with the first
    need of them, the most.  Every value is true where all is well; `figures` are those it was
    judged by.
    """
    third = max(1, len(rests) // 3)
    before = statistics.median(one.rss_bytes for one in rests[:third])
    growth = statistics.median(one.rss_bytes for one in rests[-third:]) - before
    allowed = max(_LEAST_GROWTH_BYTES, _GROWTH * before)
    return {
        "pages_free": all(one.pages == 0 for one in rests),
        "nothing_left_inside": all(one.inside == 0 for one in rests),
        "descriptors_flat": not _grew([one.descriptors for one in rests], third),
        "threads_flat": not _grew([one.threads for one in rests], third),
        "rss_flat": growth <= allowed,
        "figures": {
            "rss_growth_bytes": round(growth),
            "allowed_growth_bytes": round(allowed),
            "rests": [asdict(one) for one in rests],
        },
    }


def _grew(counts: list[int], third: int) -> bool:
    return max(counts[-third:]) > max(counts[:third])


def _connections(process: psutil.Process) -> int:
    """Of clients, beside the one that asks for the metrics."""
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections()) - 1


def _total(text: str, name: str, **labels: str) -> int:
    """Of all models that are loaded."""
    found = [
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    if not found:
        raise HMTError(f"the server's /metrics has no {name}")
    return round(sum(found))
