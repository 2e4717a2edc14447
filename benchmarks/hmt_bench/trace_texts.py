"""Texts of several kinds, to record traces of experts with.

Prose comes from the held-out text, code from HMT's own source, tables and chats are made from a
seed.  Each kind is read as it is, token by token, as in decoding.
"""
# ruff: noqa: SIM905  (words read better unquoted)

import json
import random
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmt.bench.tasks import BEGIN, COLOURS, NAMES, OBJECTS, PLACES, short_task
from hmt.engine import Engine

if TYPE_CHECKING:
    from hmt.engine import LoadedModel

_SEED = 20
_PROSE_START = 40_000  # characters; the beginning is what people look at when they test


def texts(held_out: str) -> dict[str, str]:
    """Text by kind: prose (from `held_out`), code, tables, chat."""
    rng = random.Random(_SEED)
    code = [(files("hmt") / "engine" / name).read_text() for name in ("api.py", "engine_core.py")]
    return {
        "prose": held_out[_PROSE_START:],
        "code": "\n".join(code),
        "tables": "".join(_table(rng) for _ in range(40)),
        "chat": "".join(BEGIN + "".join(short_task(rng)) for _ in range(200)),
    }


def record(
    model: Path,
    folder: Path,
    held_out: str,
    *,
    tokens: int,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Path]:
    """A trace of `tokens` decoded tokens for each kind, in `folder`; the files.

    Raises what loading raises, and ConfigError for a model without experts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, text in texts(held_out).items():
        progress(kind)
        file = folder / f"{model.resolve().name}-{kind}.jsonl.gz"
        given = {"context": tokens, **(options or {}), "expert_trace": file}
        with Engine(**given) as engine:
            read(engine.load_model(model), text, tokens)
        written.append(file)
    return written


def read(model: "LoadedModel", text: str, tokens: int) -> None:
    """Have `model` read the first `tokens` tokens of `text` one by one."""
    ids = model.tokenizer.encode(text)[:tokens]
    model.logits(ids, [], prefill=0)


def _table(rng: random.Random) -> str:
    """A list, a table or some JSON about people and things."""
    rows = [
        (who, rng.randrange(5, 90), rng.choice(COLOURS), rng.choice(OBJECTS), rng.choice(PLACES))
        for who in rng.sample(NAMES, rng.randint(3, 8))
    ]
    names = "name age colour owns lives".split()
    kind = rng.randrange(4)
    if kind == 0:
        lines: list[Sequence[object]] = [names, ["---"] * len(names), *rows]
        return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n\n"
    if kind == 1:
        return "\n".join(",".join(map(str, line)) for line in (names, *rows)) + "\n\n"
    if kind == 2:
        return json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1) + "\n\n"
    numbered = [
        f"{n}. {who}, {age}: a {colour} {what}"
        for n, (who, age, colour, what, _) in enumerate(rows, 1)
    ]
    return "\n".join(numbered) + "\n\n"
