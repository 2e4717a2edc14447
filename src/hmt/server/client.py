"""The client of a request, for what works on it: how much it sent, and how to cut it off."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from hmt.base.units import KIB

T = TypeVar("T")

_LARGE: Final = 64 * KIB  # bytes of a body whose text takes tens of milliseconds to tokenize
_one_large: Final = ThreadPoolExecutor(1, thread_name_prefix="hmt-large")
_one_with_images: Final = ThreadPoolExecutor(1, thread_name_prefix="hmt-images")


@dataclass(frozen=True, slots=True)
class Client:
    """body_bytes: of its request; cut: ends its connection at once.

    state   of the request's scope: what the log says of it beside its response
    hold    counts so many bytes more as part of its body; raises ApiError where these are too many
    """

    body_bytes: int = 0
    cut: Callable[[], None] = lambda: None
    state: dict[str, Any] = field(default_factory=dict)
    hold: Callable[[int], None] = lambda more: None


CLIENT: Final[ContextVar[Client]] = ContextVar("client", default=Client())  # noqa: B039


async def off_loop(work: Callable[[], T], *, images: bool = False) -> T:
    """The result of `work`, which a thread computes: the event loop serves all clients.

    Of large requests one at a time: each may take 200 MB for a while, and all cores are needed.
    Those with `images` wait for each other alone: one of a stranger may take seconds to decode, and
    the threads of all others are few.
    """
    if CLIENT.get().body_bytes <= _LARGE and not images:
        return await asyncio.to_thread(work)
    context, loop = contextvars.copy_context(), asyncio.get_running_loop()
    thread = _one_with_images if images else _one_large
    return await loop.run_in_executor(thread, lambda: context.run(work))
