"""Decoding with and without draft tokens, interleaved, on prompts of several kinds.

No request learns from another's tokens.  All answers are compared: draft tokens must not change
them.  llama.cpp's own speculation may stand beside it: ways "llama.cpp=N", with N draft tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from hmt.base.errors import HMTError
from hmt.bench.environment import describe
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel, Phase, SpeculationAccount
from hmt_bench.llama_lookup import LlamaLookup

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
_LLAMA: Final = "llama.cpp="


@dataclass(slots=True)
class Rates:
    """Of one prompt in one way: tokens per second of each round, and what drafts gave.

    answers   that differ from each other
    """

    tokens_per_s: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    drafts: SpeculationAccount = field(default_factory=SpeculationAccount)
    answers: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, phase: Phase, drafts: SpeculationAccount) -> None:
        """Count one answer."""
        self.tokens_per_s.append(phase.tokens_per_s)
        self.steps += phase.steps
        self.tokens += phase.tokens
        self.drafts.merge(drafts)

    def add_peer(self, answer: tuple[int, ...], seconds: float) -> None:
        """Count one answer of llama.cpp, all but its first token."""
        self.tokens_per_s.append((len(answer) - 1) / seconds)
        self.answers.add(answer)


def run(
    model: Path,
    ways: Sequence[str],
    options: dict[str, Any],
    *,
    tokens: int = 200,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Decode each prompt in each way; a benchmark file's content.

    ways   values of `speculate`, and "llama.cpp=N"

    Raises HMTError where an answer differs from that of the first way, but for llama.cpp's, which
    rounds in its own way.
    """
    rates = {(name, way): Rates() for name in PROMPTS for way in ways}
    with ExitStack() as stack:
        loaded: dict[str, LoadedModel] = {}
        for way in ways:
            if not way.startswith(_LLAMA):
                progress(f"loading for {way}")
                engine = stack.enter_context(Engine(**options, speculate=way))
                loaded[way] = engine.load_model(model)
        own = next(iter(loaded.values()))
        machine, threads = own.prepared.machine, torch.get_num_threads()
        peers = {
            way: stack.enter_context(closing(_peer(model, way, threads, options["context"])))
            for way in ways
            if way.startswith(_LLAMA)
        }
        for number in range(rounds):
            for name, prompt in PROMPTS.items():
                progress(f"{name}, round {number + 1} of {rounds}")
                for way in ways if number % 2 == 0 else reversed(ways):
                    if way in peers:
                        ids = prompt_ids(own, prompt)
                        rates[name, way].add_peer(*peers[way].decode(ids, tokens))
                    else:
                        _decode(loaded[way], prompt, tokens, f"{name} {number}", rates[name, way])
                if len(set().union(*(rates[name, way].answers for way in loaded))) > 1:
                    raise HMTError(f"draft tokens changed the answer to {name!r}: please report it")
    return {
        "benchmark": "speculation",
        "machine": describe(machine),
        "model": model.name,
        "options": {name: str(value) for name, value in options.items()},
        "threads": threads,
        "tokens": tokens,
        "rounds": rounds,
        "llama_cpp_repacks": {way: peer.repacks for way, peer in peers.items()},
        "results": [
            {"prompt": name, "way": way, **_figures(found, rates[name, _compared_with(way, ways)])}
            for (name, way), found in rates.items()
        ],
    }


def _peer(model: Path, way: str, threads: int, context: int) -> LlamaLookup:
    return LlamaLookup(model, threads, context, int(way.removeprefix(_LLAMA)))


def _decode(model: LoadedModel, prompt: str, tokens: int, salt: str, rates: Rates) -> None:
    request = Request(prompt_ids(model, prompt), tokens, ignore_eos=True, cache_salt=salt)
    model.reset_summary()
    answer = model.infer(request)
    summary = model.summary()
    rates.answers.add(answer.token_ids)
    rates.add(summary.generation, summary.speculation)


def _compared_with(way: str, ways: Sequence[str]) -> str:
    """The first way of the same engine."""
    is_peer = way.startswith(_LLAMA)
    return next(other for other in ways if other.startswith(_LLAMA) == is_peer)


def prompt_ids(model: LoadedModel, prompt: str) -> list[int]:
    """The prompt's tokens, in the chat template where there is one."""
    if model.tokenizer.has_chat_template:
        return model.tokenizer.chat_prompt([{"role": "user", "content": prompt}])
    return model.tokenizer.encode(prompt)


def _figures(found: Rates, first: Rates) -> dict[str, Any]:
    pairs = zip(found.tokens_per_s, first.tokens_per_s, strict=True)
    return {
        "tokens_per_s": median(found.tokens_per_s),
        "ratio": median(own / other for own, other in pairs),
        "rounds_tokens_per_s": found.tokens_per_s,
        "tokens_per_step": found.tokens / found.steps if found.steps else None,
        "answers": len(found.answers),
        "same_answer": found.answers == first.answers,
        "proposed": found.drafts.proposed,
        "accepted": found.drafts.accepted,
        "by_depth": found.drafts.by_depth,
    }
