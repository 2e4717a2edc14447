"""Load on an endpoint, cell by cell: lengths of prompts and answers, and how many ask."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from hmt.base.errors import ConfigError
from hmt.bench.environment import describe
from hmt.bench.load.client import Client, Endpoint, connect, first_model, versioned
from hmt.bench.load.loops import closed_loop, open_loop, poisson_arrivals
from hmt.bench.load.outcome import Outcome, summarise
from hmt.bench.load.own_server import OwnServer, own_server, watched
from hmt.bench.load.prompts import Prompts
from hmt.hardware.machine import machine_for

_PER_USER = 4
_OPEN_REQUESTS = 32
_POSITIONS_BESIDE = 128  # per request: a template, and prompts that are longer than meant


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: so many users, or so many arrivals per second."""

    prompt_tokens: int
    output_tokens: int
    users: int | None
    rate: float | None

    def __str__(self) -> str:
        load = f"{self.users} users" if self.rate is None else f"{self.rate:g} per second"
        return f"prompts of {self.prompt_tokens}, answers of {self.output_tokens}, {load}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is measured: each length of prompts with each of answers, by users and by rates.

    users     in closed loop: each asks again as soon as it has its answer
    rates     in open loop: requests per second, at moments that `seed` decides
    requests  counted ones of each cell; 4 per user, or 32, when None
    warmup    requests before, which do not count; one per user, or 1, when None
    seed      of the arrivals and of what is asked
    """

    prompts: tuple[int, ...] = (128,)
    outputs: tuple[int, ...] = (64,)
    users: tuple[int, ...] = (1, 4, 16)
    rates: tuple[float, ...] = ()
    requests: int | None = None
    warmup: int | None = None
    seed: int = 0

    def cells(self) -> Iterator[Cell]:
        """In the order in which they are measured."""
        for prompt in self.prompts:
            for output in self.outputs:
                yield from (Cell(prompt, output, users, None) for users in self.users)
                yield from (Cell(prompt, output, None, rate) for rate in self.rates)

    @property
    def most_users(self) -> int:
        """Of all cells; what is open has no bound, and counts as 16."""
        return max([*self.users, 16 if self.rates else 1])

    @property
    def positions(self) -> int:
        """Of keys and values, so that so many can be computed at once."""
        longest = max(self.prompts) + max(self.prompts) // 4 + max(self.outputs)
        return self.most_users * (longest + _POSITIONS_BESIDE)


def run(
    matrix: Matrix,
    text: str,
    *,
    model: Path,
    url: str | None = None,
    name: str | None = None,
    key: str | None = None,
    chat: bool = False,
    timeout_s: float = 600.0,
    serve_options: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure the endpoint at `url`; without one, `model` by a server of our own.

    text            what prompts are pieces of
    name            what the endpoint calls the model; its first one when None
    serve_options   of hmt serve, where it is ours; its context and batch hold all users when left
                    out

    Raises ConfigError for a matrix without cells, HMTError where the endpoint does not answer at
    all.  Requests that fail later are counted.
    """
    if not list(matrix.cells()) or not text:
        raise ConfigError("there is nothing to measure: give lengths, users or rates, and a text")
    with ExitStack() as stack:
        server: OwnServer | None = None
        if url is not None:
            address = versioned(url)
        else:
            progress(f"starting hmt serve {model}")
            server = stack.enter_context(own_server(model, _with_room(serve_options, matrix)))
            address = server.url
        named = name or first_model(address, key)
        endpoint = Endpoint(address, named, key, chat, timeout_s)
        found = asyncio.run(_measure(matrix, text, endpoint, server, progress))
    return {
        "target": "hmt serve" if server is not None else address,
        "serve_options": list(serve_options),
        "model": named,
        "form": "chats" if chat else "completions",
        "matrix": asdict(matrix),
        "machine": describe(machine_for(model)) | {"cpus": psutil.cpu_count()},
        **found,
    }


def _with_room(options: Sequence[str], matrix: Matrix) -> list[str]:
    """The options, and room for all users where they do not say how much."""
    given = {option.split("=")[0] for option in options}
    room = {"--max-batch": matrix.most_users}
    if not given & {"--context", "--max-context"}:
        room["--context"] = max(2048, matrix.positions)
    added = [(name, str(value)) for name, value in room.items() if name not in given]
    return [*options, *(word for pair in added for word in pair)]


async def _measure(
    matrix: Matrix,
    text: str,
    endpoint: Endpoint,
    server: OwnServer | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    prompts = Prompts(text, matrix.seed)
    pid = None if server is None else server.pid
    async with connect(endpoint) as client:
        progress("asking what the endpoint takes")
        await client.settle(prompts.piece(100, 0))
        for tokens in matrix.prompts:
            await prompts.measure(client, tokens)
        results = []
        for number, cell in enumerate(matrix.cells()):
            progress(str(cell))
            results.append(await _cell(client, matrix, cell, number, prompts, pid))
        settled = client.endpoint
    return {"ignore_eos": settled.ignore_eos, "usage": settled.usage, "results": results}


async def _cell(
    client: Client, matrix: Matrix, cell: Cell, number: int, prompts: Prompts, pid: int | None
) -> dict[str, Any]:
    users = cell.users or 1
    warmup = users if matrix.warmup is None else matrix.warmup
    usual = _OPEN_REQUESTS if cell.users is None else _PER_USER * users
    requests = usual if matrix.requests is None else matrix.requests
    # Made beforehand: to make them takes time of the processor that a server may need.
    made = [prompts.of(cell.prompt_tokens, number, i) for i in range(warmup + requests)]

    async def warm_up(request: int, due_s: float) -> Outcome:
        return await client.ask(made[request], cell.output_tokens, due_s)

    async def counted(request: int, due_s: float) -> Outcome:
        return await client.ask(made[warmup + request], cell.output_tokens, due_s)

    await closed_loop(warm_up, users, warmup)
    begin = perf_counter()
    async with watched(pid) as watch:
        if cell.rate is None:
            outcomes = await closed_loop(counted, users, requests)
        else:
            arrivals = poisson_arrivals(cell.rate, requests, matrix.seed)
            outcomes = await open_loop(counted, arrivals)
    usage = {
        "server_rss_bytes": watch.rss_bytes,
        "server_cpu_cores": watch.cpu_cores,
        "load_cpu_cores": watch.own_cores,
    }
    requested = [
        {"due_s": one.due_s - begin, "status": one.status, "ttft_s": one.ttft_s,
         "tpot_s": one.tpot_s, "e2e_s": one.e2e_s, "prompt_tokens": one.prompt_tokens,
         "tokens": one.tokens}
        for one in sorted(outcomes, key=lambda one: one.due_s)
    ]  # fmt: skip
    return asdict(cell) | summarise(outcomes, cell.output_tokens) | usage | {"each": requested}
