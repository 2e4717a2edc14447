"""Train a reference model: a dense Llama, or a DeepSeek-V3 MoE with an MTP layer.

    python training/train.py dense|moe --data FOLDER --out FOLDER [--seconds 300] [--tiny]

FOLDER comes from prepare.py.  Time, not steps, ends the training: lengths and learning rate follow
the share of `--seconds` that has passed.  `--tiny` shows on a CPU that everything works.
"""

import argparse
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from architectures import MultiTokenPrediction, build, routers
from export import export
from mixture import Mixture
from optimizer import MasterAdamW, weighted_loss
from tokenizers import Tokenizer
from transformers import PreTrainedModel

SEEDS = range(12)  # hmt.bench.quality measures with another one


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a training run goes over time.

    phases            (share of the time at which it ends, sequence length)
    tokens_per_step   of a batch
    pool_size         short tasks that each seed makes at the start
    text_share        of short sequences, those that are book text
    """

    phases: tuple[tuple[float, int], ...]
    tokens_per_step: int
    pool_size: int
    text_share: float = 0.4

    def length(self, share: float, step: int) -> int:
        """Sequence length at this share of the time.  Later lengths alternate with the first."""
        own = next(length for end, length in self.phases if share < end)
        return own if step % 2 == 0 else self.phases[0][1]


FULL = Schedule(((0.62, 2048), (0.84, 16384), (math.inf, 131072)), 131072, 4000)
TINY = Schedule(((0.5, 256), (math.inf, 512)), 2048, 200)


class Batches:
    """Training batches, each made in the background while the one before it is used."""

    def __init__(self, data: Path, tokenizer: Tokenizer, schedule: Schedule) -> None:
        text = np.fromfile(data / "train.bin", np.uint16)
        self._tokens = schedule.tokens_per_step
        self._workers = ThreadPoolExecutor(len(SEEDS))
        self._ahead = ThreadPoolExecutor(1)

        def encode(part: str) -> list[int]:
            return tokenizer.encode(part, add_special_tokens=False).ids

        self._mixtures = list(
            self._workers.map(
                lambda s: Mixture(encode, text, s, schedule.pool_size, schedule.text_share), SEEDS
            )
        )
        self._next = None

    def take(self, length: int, next_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (int64) and loss weights (f32), both [batch, length]; starts on the next."""
        batch = (self._next or self._ahead.submit(self._make, length)).result()
        self._next = self._ahead.submit(self._make, next_length)
        return batch

    def _make(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(1, self._tokens // length)

        def rows(worker: int) -> list:
            own = range(worker, size, len(SEEDS))
            return [self._mixtures[worker].sample(length) for _ in own]

        sequences = [row for part in self._workers.map(rows, range(len(SEEDS))) for row in part]
        ids, weights = zip(*sequences, strict=True)
        return torch.from_numpy(np.stack(ids).astype(np.int64)), torch.from_numpy(np.stack(weights))


class RouterBalance:
    """Evens the experts' load by their selection bias (DeepSeek-V3 report, section 2.1.2)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = routers(model)
        self._loads: dict[torch.nn.Module, torch.Tensor] = {}
        for router in self._routers:
            router.register_forward_hook(self._count)

    @torch.no_grad()
    def step(self, speed: float) -> None:
        """Raise the bias of experts with less than their share, lower that of the others."""
        for router in self._routers:
            load = self._loads[router]
            router.e_score_correction_bias += speed * torch.sign(load.mean() - load)

    def _count(self, router: torch.nn.Module, inputs: object, output: tuple) -> None:
        chosen = output[2]  # int64 [tokens, experts per token]
        self._loads[router] = torch.bincount(chosen.flatten(), minlength=router.num_experts).float()


def timed_steps(seconds: float, every: float = 15) -> Iterator[tuple[int, float, bool]]:
    """Steps until `seconds` have passed.

    (number, share of the time that has passed, whether to print: at first, then `every` seconds).
    """
    start, printed = time.monotonic(), 0.0
    for step in count():
        now = time.monotonic() - start
        if now >= seconds:
            print(f"stopped after {step} steps", flush=True)
            return
        prints = step == 0 or now - printed > every
        printed = now if prints else printed
        yield step, now / seconds, prints


def learning_rate(step: int, share: float) -> float:
    """A warm-up of 100 steps, then a half cosine to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return 3e-3 * min(1, step / 100) * (0.05 + 0.95 * cosine)


def train_trunk(
    model: PreTrainedModel, batches: Batches, schedule: Schedule, seconds: float
) -> None:
    """Train all parameters of `model`, in place."""
    optimizer, balance = MasterAdamW(model.parameters(), weight_decay=0.1), RouterBalance(model)
    seen = 0
    for step, share, prints in timed_steps(seconds):
        length = schedule.length(share, step)
        ids, weights = batches.take(length, schedule.length(share, step + 1))
        ids, weights = ids.to(model.device), weights.to(model.device)
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = weighted_loss(states, ids, weights, model.lm_head)
        loss.backward()
        optimizer.step(learning_rate(step, share))
        balance.step(2e-3 * (1 - share))
        seen += ids.numel()
        if prints:
            print(
                f"{share:4.0%}  step {step}  length {ids.shape[1]}  loss {loss.item():.3f}  "
                f"{seen / 1e6:.1f} M tokens",
                flush=True,
            )


def train_mtp(
    model: PreTrainedModel, batches: Batches, schedule: Schedule, seconds: float
) -> MultiTokenPrediction:
    """An MTP module for `model`, which stays as it is."""
    model.requires_grad_(False)
    mtp = MultiTokenPrediction(model)
    optimizer = MasterAdamW(mtp.parameters(), weight_decay=0.01)
    length = schedule.phases[0][1]
    for step, share, prints in timed_steps(seconds):
        ids, weights = (part.to(model.device) for part in batches.take(length, length))
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        states = mtp(model, hidden, ids)
        loss = weighted_loss(states, ids[:, 1:], weights[:, 1:], model.lm_head)
        loss.backward()
        optimizer.step(2e-3 * min(1, step / 50) * (1 - share))
        if prints:
            print(f"mtp {share:4.0%}  step {step}  loss {loss.item():.3f}", flush=True)
    return mtp


def main() -> None:
    """Train, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("dense", "moe"))
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--mtp-seconds", type=float, default=60)
    parser.add_argument("--tiny", action="store_true", help="short sequences, small batches")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    model = build(options.kind, tokenizer.get_vocab_size()).to(device)
    if options.kind == "moe" and device == "cuda":
        model.set_experts_implementation("grouped_mm")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {device}")
    schedule = TINY if options.tiny else FULL
    batches = Batches(options.data, tokenizer, schedule)
    train_trunk(model, batches, schedule, options.seconds)
    mtp = None
    if options.kind == "moe":
        mtp = train_mtp(model, batches, schedule, options.mtp_seconds)
    export(options.out, model, tokenizer, mtp)
    print(f"wrote {options.out}; score.py measures it")


if __name__ == "__main__":
    main()
