"""Who asks for what, and when: recorded, arriving by chance, or users that wait for answers.

A record has one JSON object per line:

    {"due_s": 0.0, "prompt_tokens": 512, "tokens": 128}
    {"due_s": 0.4, "prompt_tokens": 90, "tokens": 31, "max_tokens": 256, "owner": "b"}

"tokens" are those that the answer has in the end, "max_tokens" those that it may have (as many,
when left out), "owner" and "priority" are a request's.  What `hmt bench serve --json` writes is
read, too.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hmt.base.errors import ConfigError

_KEYS = ("due_s", "prompt_tokens", "tokens", "max_tokens", "owner", "priority")
_LONGEST = 8.0  # times the mean: no length is beyond that
_MOST = 1_000_000  # requests that come by chance: they take minutes to simulate


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request.

    due_s           when it comes
    tokens          of its answer, one at least
    max_tokens      that it may have; the scheduler knows only these
    """

    due_s: float
    prompt_tokens: int
    tokens: int
    max_tokens: int
    owner: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and answers, in tokens.

    spread   0: all are as long; else the sigma of a log-normal distribution with these means
    """

    prompt: int
    answer: int
    spread: float = 0.0

    def draw(self, chance: random.Random, due_s: float) -> SimulatedRequest:
        """A request that comes then."""
        answer = self._one(self.answer, chance)
        return SimulatedRequest(due_s, self._one(self.prompt, chance), answer, answer)

    def _one(self, mean: int, chance: random.Random) -> int:
        if not self.spread:
            return mean
        drawn = mean * math.exp(self.spread * chance.gauss(0, 1) - self.spread**2 / 2)
        return max(1, min(round(drawn), self.most(mean)))

    def most(self, mean: int) -> int:
        """The longest of those with this mean."""
        return round(_LONGEST * mean) if self.spread else mean


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of their time, and in a closed loop those that follow.

    again    None: nobody asks again.  Else who has an answer asks for that at once
    until_s  when nobody asks again
    """

    requests: tuple[SimulatedRequest, ...]
    again: Lengths | None = None
    until_s: float = 0.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Positions that the longest request may take."""
        if self.again is not None:
            lengths = self.again
            return lengths.most(lengths.prompt) + lengths.most(lengths.answer)
        return max((one.prompt_tokens + one.max_tokens for one in self.requests), default=0)

    def followers(self) -> Callable[[float], SimulatedRequest | None]:
        """What is asked next by somebody who has an answer at that moment."""
        chance = random.Random(self.seed + 1)

        def follower(now: float) -> SimulatedRequest | None:
            if self.again is None or now >= self.until_s:
                return None
            return self.again.draw(chance, now)

        return follower


def arrivals(rate: float, seconds: float, lengths: Lengths, seed: int = 0) -> Traffic:
    """Requests at random moments, `rate` per second on average (a Poisson process).

    Raises ConfigError where none comes, or millions.
    """
    if rate * seconds > _MOST:
        raise ConfigError(
            f"{rate:g} requests a second for {seconds:g} s are about {rate * seconds:.3g}; at most "
            f"{_MOST} can be simulated: lower --rate or --seconds"
        )
    chance, now = random.Random(seed), 0.0
    asked = []
    while (now := now + chance.expovariate(rate)) < seconds:
        asked.append(lengths.draw(chance, now))
    if not asked:
        raise ConfigError(
            f"no request comes in {seconds:g} s with {rate:g} a second: raise --rate or --seconds, "
            "or try another --seed"
        )
    return Traffic(tuple(asked))


def closed_loop(users: int, seconds: float, lengths: Lengths, seed: int = 0) -> Traffic:
    """`users` that ask again as soon as they have an answer, for so many seconds."""
    chance = random.Random(seed)
    first = tuple(lengths.draw(chance, 0.0) for _ in range(users))
    return Traffic(first, lengths, seconds, seed)


def read_requests(path: Path, cell: int | None = None) -> Traffic:
    """Requests of a file; see above.

    cell   of a file of `hmt bench serve`: which of its rows, from 1

    Raises ConfigError for what is no such file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"requests cannot be read from {path}: {error}") from None
    found = _whole(text)
    rows: Iterable[tuple[str, Any]]
    if isinstance(found, dict) and "results" in found:
        rows = _measured(found["results"], cell, path)
    elif cell is not None:
        raise ConfigError(f"--cell {cell}: {path} has requests, and no rows of results to choose")
    else:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
        rows = [(f"line {number}", _whole(line)) for number, line in lines if line.strip()]
    asked = [_checked(row, f"{path}: {place}") for place, row in rows]
    if not asked:
        raise ConfigError(f"{path} has no request")
    begin = min(one.due_s for one in asked)
    moved = (replace(one, due_s=one.due_s - begin) for one in asked)
    return Traffic(tuple(sorted(moved, key=lambda one: one.due_s)))


def _whole(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _measured(cells: object, cell: int | None, path: Path) -> list[tuple[str, Any]]:
    """Those that were answered, of one row of the results."""
    rows = cells if isinstance(cells, list) else []
    if cell is None and len(rows) > 1:
        raise ConfigError(f"{path} has {len(rows)} rows of results: choose one with --cell")
    if not 1 <= (cell or 1) <= len(rows):
        asked = "" if cell is None else f"--cell {cell}: "
        raise ConfigError(f"{asked}{path} has {len(rows)} rows of results")
    chosen = rows[(cell or 1) - 1]
    each = chosen.get("each") if isinstance(chosen, Mapping) else None
    if not isinstance(each, list) or not all(isinstance(row, Mapping) for row in each):
        raise ConfigError(
            f"row {cell or 1} of the results in {path} has no list of its requests (each), as hmt "
            "bench serve --json writes it"
        )
    return [
        (f"request {number}", {key: row[key] for key in _KEYS if key in row})
        for number, row in enumerate(each, 1)
        if row.get("status") == "ok"
    ]


def _checked(row: Any, place: str) -> SimulatedRequest:
    if not isinstance(row, Mapping) or not set(row) <= set(_KEYS):
        raise ConfigError(f"{place} must be a JSON object with {', '.join(_KEYS)}")
    due: Any = row.get("due_s")
    owner = row.get("owner", "")
    counts = [row.get("prompt_tokens"), row.get("tokens"), row.get("max_tokens", row.get("tokens"))]
    counted = all(type(count) is int and count > 0 for count in counts)
    if type(due) not in (int, float) or not math.isfinite(due := float(due)) or not counted:
        raise ConfigError(
            f"{place} needs due_s in seconds, and prompt_tokens and tokens of 1 at least"
        )
    priority = row.get("priority", 0)
    if not isinstance(owner, str) or type(priority) is not int:
        raise ConfigError(f"{place}: owner is a text, and priority a whole number")
    prompt, tokens, most = counts
    return SimulatedRequest(due, prompt, tokens, max(tokens, most), owner, priority)
