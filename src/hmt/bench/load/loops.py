"""Who asks when: users that wait for their answers, or arrivals that wait for none."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

import numpy as np

from hmt.bench.load.outcome import Outcome

Ask = Callable[[int, float], Awaitable[Outcome]]  # number of the request, moment it is due


async def closed_loop(ask: Ask, users: int, requests: int) -> list[Outcome]:
    """`users` that ask again as soon as they have an answer, until `requests` were made.

    So many are under way all the time, but for the end, when nothing is left to ask.
    """
    outcomes: list[Outcome] = []
    numbers = iter(range(requests))  # shared by all users

    async def user() -> None:
        for number in numbers:
            outcomes.append(await ask(number, perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return outcomes


async def open_loop(ask: Ask, arrivals: Sequence[float]) -> list[Outcome]:
    """A request at each of these moments, in seconds from now, whatever became of the others."""
    start = perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []

    async def one(number: int, due_s: float) -> Outcome:
        return await ask(number, due_s)

    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(start + arrival - perf_counter())
            tasks.append(group.create_task(one(number, start + arrival)))
    return [task.result() for task in tasks]


def poisson_arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Moments in seconds, `rate` per second on average, each independent of the others."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    return [float(moment) for moment in np.cumsum(gaps)]
