"""Train a mixture of recursions, and find the thresholds that give it its depths.

    python training/train_recursions.py --data FOLDER --out FOLDER [--kv own|first] [--seconds 300]

FOLDER comes from prepare.py.  After a first fifth of the time, six of ten steps let a random share
of the tokens into each further recursion, so that one set of weights serves all depths; the others
let all of them in.  `--tiny`
shows on a CPU that everything works.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from architectures import CONTEXT
from export import quantize_checkpoint, save_tokenizer
from optimizer import MasterAdamW, weighted_loss
from recursions import MixtureOfRecursions, Output, configuration
from tokenizers import Tokenizer
from train import TINY, Batches, Schedule, learning_rate, timed_steps

# Only the order of scores counts, so they would drift without a small price of their squares.
_DRIFT = 1e-3
_FIRST_WHOLE, _WHOLE_STEPS, _LEAST_SHARE = 0.2, 0.4, 0.25
_FULL = Schedule(
    ((0.3, 512), (0.7, 2048), (0.88, 8192), (math.inf, 32768)), 65536, 4000, text_share=0.2
)
DEPTHS = [round(0.05 * n, 2) for n in range(9, 20)]  # of which the thresholds are written down


def train(model: MixtureOfRecursions, batches: Batches, schedule: Schedule, seconds: float) -> None:
    """Train all parameters of `model`, in place."""
    optimizer = MasterAdamW(model.parameters(), weight_decay=0.1)
    further = model.config.num_recursions - 1
    seen, rng = 0, random.Random(0)
    for step, part, prints in timed_steps(seconds):
        length = schedule.length(part, step)
        ids, weights = batches.take(length, schedule.length(part, step + 1))
        ids, weights = ids.to(model.device), weights.to(model.device)
        whole = part < _FIRST_WHOLE or rng.random() < _WHOLE_STEPS
        share = 1.0 if whole else rng.uniform(_LEAST_SHARE, 1)
        output = model.model(ids, shares=[share] * further)
        loss = weighted_loss(output.last_hidden_state, ids, weights, model.lm_head)
        (loss + _DRIFT * output.scores.square().mean()).backward()
        optimizer.step(learning_rate(step, part))
        seen += ids.numel()
        if prints:
            spread = ", ".join(f"{one:.2f}" for one in output.scores.std((1, 2)).tolist())
            print(
                f"{part:4.0%}  step {step}  length {ids.shape[1]}  share {share:.2f}  loss "
                f"{loss.item():.3f}  scores +- {spread}  {seen / 1e6:.1f} M tokens",
                flush=True,
            )


def share_at(depth: float, recursions: int, layers: int) -> float:
    """The share of tokens, the same in each further recursion, at which `depth` is applied.

    depth   layers that a token passes through on average, of those that there are at most
    layers  of the block
    """
    wanted = depth * (layers * recursions + 2) - (layers + 2)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        sums = layers * sum(middle**n for n in range(1, recursions))
        low, high = (middle, high) if sums < wanted else (low, middle)
    return high


@torch.no_grad()
def thresholds(
    model: MixtureOfRecursions, samples: list[torch.Tensor], depth: float
) -> tuple[list[float], float]:
    """Scores above which tokens go on, and the depth that they give on `samples`.

    One recursion after the other, since tokens that go on see each other.
    """
    config = model.config
    share = share_at(depth, config.num_recursions, config.recursion_layers)
    found: list[float] = []
    for number in range(config.num_recursions - 1):
        before = [*found, *[math.inf] * (config.num_recursions - 1 - number)]
        outputs: list[Output] = [model.model(ids, thresholds=before) for ids in samples]
        kept = []
        for output in outputs:
            scores = output.scores[number].flatten()
            kept.append(scores[output.active[number - 1].flatten()] if number else scores)
        scores = torch.cat(kept).sort().values
        at = min(len(scores) - 1, max(0, round((1 - share) * len(scores)) - 1))
        found.append(round(float(scores[at]), 5))
    last = [model.applications(model.model(ids, thresholds=found).active) for ids in samples]
    return found, sum(last) / len(last)


def main() -> None:
    """Train, find thresholds, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--kv", choices=("own", "first"), default="own", help="whose keys recursions attend to"
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tiny", action="store_true", help="short sequences, small batches")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    config = configuration(tokenizer.get_vocab_size(), CONTEXT, options.kv)
    model = MixtureOfRecursions(config).to(device, torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {device}")
    schedule = TINY if options.tiny else _FULL
    batches = Batches(options.data, tokenizer, schedule)
    train(model, batches, schedule, options.seconds)
    length = schedule.phases[1][1]
    samples = [batches.take(length, length)[0].to(device) for _ in range(1 if options.tiny else 4)]
    model.save(options.out)  # what was trained stays, whatever thresholds are found
    for depth in DEPTHS[1::5] if options.tiny else DEPTHS:
        found, reached = thresholds(model, samples, depth)
        config.recursion_thresholds[str(depth)] = found
        print(f"depth {depth}: thresholds {found}, reached {reached:.3f}", flush=True)
    model.save(options.out)
    quantize_checkpoint(options.out)
    save_tokenizer(options.out, tokenizer)
    print(f"wrote {options.out}; score.py measures it")


if __name__ == "__main__":
    main()
