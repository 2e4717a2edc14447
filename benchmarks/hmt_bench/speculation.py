"""Decoding with and without draft tokens, interleaved, on prompts of several kinds.

No request learns from another's tokens.  All answers are compared: draft tokens must not change
them.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel, Phase, SpeculationAccount

_CODE: Final = '''def area(width, height):
    """The area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    """The perimeter of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)
'''
_NEWS: Final = (
    "The harbour of Millbrook was closed on Tuesday after a storm damaged two of its three piers. "
    "The harbour master, Anna Field, said that the remaining pier can take fishing boats only, and "
    "that ferries to the islands leave from Eastport until the piers are repaired. Repairs begin "
    "on Monday and are expected to take six weeks. The town council has set aside two million for "
    "them. Shop owners near the harbour fear for the summer, in which most visitors come by ferry."
)
PROMPTS: Final = {
    "summary": f"Summarise this text, sentence by sentence.\n\n{_NEWS}",
    "code": f"Add type hints to this code and change nothing else.\n\n```python\n{_CODE}```",
    "repeat": f"Repeat this text word for word.\n\n{_NEWS}",
    "chat": "What is gravity? Explain it to a child, then to a student.",
    "story": "Tell me a story about a lighthouse keeper who finds a map.",
}


@dataclass(slots=True)
class Rates:
    """Of one prompt in one way: tokens per second of each round, and what drafts gave."""

    tokens_per_s: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    drafts: SpeculationAccount = field(default_factory=SpeculationAccount)

    def add(self, phase: Phase, drafts: SpeculationAccount) -> None:
        """Count one answer."""
        self.tokens_per_s.append(phase.tokens_per_s)
        self.steps += phase.steps
        self.tokens += phase.tokens
        self.drafts.merge(drafts)


def run(
    model: Path,
    ways: Sequence[str],
    options: dict[str, Any],
    *,
    tokens: int = 200,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Decode each prompt in each way (values of `speculate`); a benchmark file's content.

    Raises HMTError where an answer differs from that of the first way.
    """
    rates = {(name, way): Rates() for name in PROMPTS for way in ways}
    with ExitStack() as stack:
        loaded: dict[str, LoadedModel] = {}
        for way in ways:
            progress(f"loading for {way}")
            engine = stack.enter_context(Engine(**options, speculate=way))
            loaded[way] = engine.load_model(model)
        for number in range(rounds):
            for name, prompt in PROMPTS.items():
                progress(f"{name}, round {number + 1} of {rounds}")
                answers = set()
                for way in ways if number % 2 == 0 else reversed(ways):
                    request = Request(
                        _asked(loaded[way], prompt), tokens, ignore_eos=True,
                        cache_salt=f"{name} {number}",
                    )  # fmt: skip
                    loaded[way].reset_summary()
                    answers.add(loaded[way].infer(request).token_ids)
                    summary = loaded[way].summary()
                    rates[name, way].add(summary.generation, summary.speculation)
                if len(answers) > 1:
                    raise HMTError(f"draft tokens changed the answer to {name!r}: please report it")
        machine = loaded[ways[0]].prepared.machine
    return {
        "benchmark": "speculation",
        "machine": describe(machine),
        "model": model.name,
        "options": {name: str(value) for name, value in options.items()},
        "tokens": tokens,
        "rounds": rounds,
        "results": [
            {"prompt": name, "way": way, **_figures(found, rates[name, ways[0]])}
            for (name, way), found in rates.items()
        ],
    }


def _asked(model: LoadedModel, prompt: str) -> Any:
    return [{"role": "user", "content": prompt}] if model.tokenizer.has_chat_template else prompt


def _figures(found: Rates, first: Rates) -> dict[str, Any]:
    pairs = zip(found.tokens_per_s, first.tokens_per_s, strict=True)
    return {
        "tokens_per_s": median(found.tokens_per_s),
        "ratio": median(own / other for own, other in pairs),
        "rounds_tokens_per_s": found.tokens_per_s,
        "tokens_per_step": found.tokens / found.steps,
        "proposed": found.drafts.proposed,
        "accepted": found.drafts.accepted,
        "by_depth": found.drafts.by_depth,
    }
