"""Logits of every family against transformers', in f32."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from plain_memory import Bench, bench_of, random_reference
from random_configs import PROMPT_TOKENS, Case, cases

TOLERANCE = 1e-4


@dataclass
class Pair:
    """HMT's model, prompts, and transformers' logits for all their positions."""

    case: Case
    bench: Bench
    prompts: list[list[int]]
    wanted: list[torch.Tensor]

    def check(self, prompt: int, first: int, logits: torch.Tensor) -> None:
        wanted = self.wanted[prompt][first : first + len(logits)]
        atol = TOLERANCE
        if self.bench.model.spec.state:
            # transformers' chunks of the delta rule solve equations, where HMT goes token by token.
            atol *= max(1.0, float(self.wanted[prompt].std()))
        torch.testing.assert_close(logits, wanted, atol=atol, rtol=0)


@pytest.fixture(scope="module", params=cases(), ids=lambda case: case.name)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    torch.set_num_threads(1)
    case: Case = request.param
    reference = random_reference(case.config, case.seed)
    rng = random.Random(case.seed)
    lengths = (PROMPT_TOKENS, PROMPT_TOKENS - 6, PROMPT_TOKENS + 11)
    prompts = [[rng.randrange(case.config.vocab_size) for _ in range(n)] for n in lengths]
    with torch.inference_mode():
        wanted = [reference(torch.tensor([p]), **case.options).logits[0] for p in prompts]
    assert all(logits.std() > 0.2 for logits in wanted), "these logits would hide errors"
    yield Pair(case, bench_of(reference, tmp_path_factory.mktemp(case.name)), prompts, wanted)


def test_prefill_in_one_step(pair: Pair) -> None:
    for number, prompt in enumerate(pair.prompts):
        pair.check(number, 0, pair.bench.run((10 + number, 0, prompt)))


def test_token_by_token(pair: Pair) -> None:
    prompt, first = pair.prompts[0], pair.case.first_chunk
    pair.check(0, 0, pair.bench.run((20, 0, prompt[:first])))
    for at in range(first, len(prompt)):
        pair.check(0, at, pair.bench.run((20, at, [prompt[at]])))


def test_prefill_in_chunks(pair: Pair) -> None:
    prompt, rng = pair.prompts[2], random.Random(pair.case.seed)
    at, size = 0, max(pair.case.first_chunk, 11)
    while at < len(prompt):
        pair.check(2, at, pair.bench.run((30, at, prompt[at : at + size])))
        at, size = at + size, rng.choice([1, 3, 9, 10])


def test_mixed_batch(pair: Pair) -> None:
    """Three sequences begin one after the other; chunks and single tokens share steps."""
    sizes = {0: [9, 1, 1, 4, 8], 1: [0, 10, 1, 1, 5], 2: [0, 12, 9, 1, 12]}
    at = [0, 0, 0]
    for turn in range(5):
        takes = [(n, sizes[n][turn]) for n in (2, 0, 1) if sizes[n][turn]]
        logits = pair.bench.run(
            *((40 + n, at[n], pair.prompts[n][at[n] : at[n] + take]) for n, take in takes)
        )
        for (n, take), part in zip(takes, logits.split([t for _, t in takes]), strict=True):
            pair.check(n, at[n], part)
            at[n] += take
    assert at == [len(prompt) for prompt in pair.prompts]


def test_checkpoint_is_used_whole(pair: Pair) -> None:
    weights = pair.bench.weights
    ignored = re.compile("|".join(pair.bench.model.spec.ignored))
    constants = {name for name in weights.tensors if ignored.search(name)}
    assert set(weights.tensors) == weights.used | constants and not weights.used & constants
    assert not constants or pair.case.config.model_type in ("minimax", "qwen4_exp_text")


def test_experts_are_leased_only_where_requested(pair: Pair) -> None:
    weights = pair.bench.weights
    weights.leased.clear()
    weights.requested.clear()
    pair.bench.run((50, 0, pair.prompts[0][:2]))
    requested = [block for blocks, _ in weights.requested for block in blocks]
    assert weights.leased_experts == requested
    sparse = len({block.layer for block in requested})
    assert len(requested) <= 2 * sparse * pair.bench.model.spec.experts_per_token
