"""Greedy tokens with and without draft tokens: equal, or an error.

Each prompt is answered in each way, with each budget, in batches of each size, and compared with
what the model answers with the first budget without draft tokens.  The gate may be left out: then
all is verified that is drafted, which is mostly wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel
from hmt_bench.open_gate import OpenGate
from hmt_bench.speculation import PROMPTS, prompt_ids


def check(
    model: Path,
    ways: Sequence[str],
    budgets: Sequence[str],
    batches: Sequence[int],
    *,
    tokens: int = 5000,
    every: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Compare about `tokens` tokens in each case; a benchmark file's content.

    ways    values of `speculate`
    every   whether to verify all draft tokens, not only those that the gate finds worth it

    Raises HMTError where a token differs.
    """
    own = -(-tokens // len(PROMPTS))
    options: dict[str, Any] = {"context": max(batches) * (own + 512), "max_batch": max(batches)}
    wanted: list[tuple[int, ...]] = []
    results: list[dict[str, Any]] = []
    machine = None
    for way, budget in [("off", budgets[0]), *((w, b) for w in ways for b in budgets)]:
        progress(f"{way} with {budget}")
        with Engine(**options, host_memory=budget, speculate=way) as engine:
            loaded = engine.load_model(model)
            machine = loaded.prepared.machine
            if every:
                loaded._core.speculator._gate = OpenGate()
            for batch in batches[-1:] if way == "off" else batches:
                progress(f"{way} with {budget}, {batch} at a time")
                loaded.reset_summary()
                answers = _answers(loaded, own, batch)
                wanted = wanted or answers
                if answers != wanted:
                    raise HMTError(
                        f"{way} with {budget} and {batch} at a time gave other tokens than off: "
                        "please report it"
                    )
                summary = loaded.summary()
                results.append(
                    {"way": way, "host_memory": budget, "batch": batch}
                    | {"equal_tokens": sum(map(len, answers)), "steps": summary.generation.steps}
                    | asdict(summary.speculation)
                )
    assert machine is not None
    return {
        "benchmark": "speculation-check",
        "machine": describe(machine),
        "model": model.name,
        "every": every,
        "results": results,
    }


def _answers(model: LoadedModel, tokens: int, batch: int) -> list[tuple[int, ...]]:
    """Of all prompts, so many at a time.  None learns from another model's answers."""
    requests = [
        Request(prompt_ids(model, prompt), tokens, ignore_eos=True, cache_salt=f"{name} {batch}")
        for name, prompt in PROMPTS.items()
    ]
    found: list[tuple[int, ...]] = []
    for first in range(0, len(requests), batch):
        answers = model.infer_batch(requests[first : first + batch])
        found += [answer.token_ids for answer in answers]
    return found
