"""Train a depth router for a model that stays as it is: which layers a token passes through.

    python training/train_router.py MODEL --data FOLDER --out FILE [--seconds 90]

MODEL is a Llama in Hugging Face's form.  In front of each layer but the first a linear gate scores
the hidden state; below a threshold the token skips the layer.  Later tokens still see its keys and
values, which the layer makes of the state that skipped.  The gates learn by distillation of the
whole model's next-token distribution, where a random share of all layers is passed.  What they are
worth is seen beside the best layers that all tokens could skip.  `--tiny` shows that everything
works.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import FULL, TINY, Batches, Schedule, timed_steps
from transformers import LlamaForCausalLM

# Only the order of scores counts, so they would drift without a small price of their squares.
_DRIFT = 1e-3
_LEAST_SHARE, _RECENT = 0.6, 1 << 17
_ALWAYS = 1e4  # the score of layers that are never skipped
DEPTHS = [round(0.05 * n, 2) for n in range(9, 20)]


class DepthRouter(nn.Module):
    """A gate for each layer: weight [layers, width] and bias [layers], both f32."""

    def __init__(self, layers: int, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(0.02 * torch.randn(layers, width))
        self.bias = nn.Parameter(torch.zeros(layers))

    def forward(self, hidden: Tensor, layer: int) -> Tensor:
        """Scores f32 of hidden [..., width]."""
        x = functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=self._eps)
        return (x * self.weight[layer]).sum(-1) + self.bias[layer]


def passes(
    model: LlamaForCausalLM,
    router: DepthRouter,
    ids: Tensor,
    threshold: float | Tensor | list[float],
) -> tuple[Tensor, Tensor]:
    """States [batch, length, width] behind the final norm, and scores of all layers but the first.

    Where a gate is shut the state goes on as it was; the gate's gradient is that of a sigmoid about
    the threshold, which may be one, or one for each layer.
    """
    trunk = model.model
    hidden = trunk.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rope = trunk.rotary_emb(hidden, positions)
    scores = []
    for number, layer in enumerate(trunk.layers):
        after = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
        if number:
            score = router(hidden, number)
            border = threshold[number] if isinstance(threshold, list) else threshold
            soft = (score - border).sigmoid()
            gate = (score > border).float() + soft - soft.detach()
            after = hidden + (gate[..., None] * (after - hidden).float()).to(hidden.dtype)
            scores.append(score)
        hidden = after
    return trunk.norm(hidden), torch.stack(scores)


def divergence(
    model: LlamaForCausalLM, student: Tensor, teacher: Tensor, weights: Tensor
) -> Tensor:
    """KL of next-token distributions, teacher to student, by the weights of what they predict."""
    total = student.new_zeros((), dtype=torch.float32)
    pairs = zip(_rows(student), _rows(teacher), weights[:, 1:].flatten().split(16384), strict=True)
    for own, wanted, weight in pairs:
        with torch.no_grad():
            target = model.lm_head(wanted).float().log_softmax(-1)
        logits = model.lm_head(own).float().log_softmax(-1)
        each = functional.kl_div(logits, target, log_target=True, reduction="none").sum(-1)
        total = total + (each * weight).sum()
    return total / weights[:, 1:].sum()


def _rows(states: Tensor) -> Iterator[Tensor]:
    yield from states[:, :-1].flatten(0, 1).split(16384)


def train(
    model: LlamaForCausalLM,
    router: DepthRouter,
    batches: Batches,
    schedule: Schedule,
    seconds: float,
) -> None:
    """Train `router`, in place."""
    optimizer = torch.optim.AdamW(router.parameters(), lr=5e-3, weight_decay=0.0)
    length, rng, recent = schedule.phases[0][1], random.Random(0), None
    for step, part, prints in timed_steps(seconds):
        ids, weights = (each.to(model.device) for each in batches.take(length, length))
        share = rng.uniform(_LEAST_SHARE, 1)
        threshold = -_ALWAYS if recent is None else _quantile(recent, 1 - share)
        with torch.no_grad():
            teacher = model.model(input_ids=ids, use_cache=False).last_hidden_state
        student, scores = passes(model, router, ids, threshold)
        loss = divergence(model, student, teacher, weights)
        (loss + _DRIFT * scores.square().mean()).backward()
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 20) * (1.05 - part)
        optimizer.step()
        optimizer.zero_grad()
        recent = scores.detach().flatten()
        recent = recent[:: max(1, len(recent) // _RECENT)]
        if prints:
            through = (scores > threshold).float().mean((1, 2)).tolist()
            used = ", ".join(f"{one:.2f}" for one in through)
            print(
                f"{part:4.0%}  step {step}  share {share:.2f}  KL {loss.item():.4f}  layers {used}",
                flush=True,
            )


@torch.no_grad()
def threshold_at(
    model: LlamaForCausalLM, router: DepthRouter, samples: list[Tensor], depth: float
) -> tuple[float, float, float]:
    """A threshold that lets tokens pass through `depth` of all layers: it, the depth, the KL."""
    layers = model.config.num_hidden_layers
    low, high = -1e4, 1e4  # scores have no scale
    for _ in range(32):
        middle = (low + high) / 2
        reached = _depth(model, router, samples, middle, layers)
        low, high = (middle, high) if reached > depth else (low, middle)
    reached = _depth(model, router, samples, high, layers)
    return high, reached, _lost(model, router, samples, high)


@torch.no_grad()
def best_constant(
    model: LlamaForCausalLM, router: DepthRouter, samples: list[Tensor], skipped: int
) -> tuple[tuple[int, ...], float]:
    """Which `skipped` layers all tokens had best skip, of all but the first; and the KL."""
    layers = model.config.num_hidden_layers
    found = {}
    for chosen in itertools.combinations(range(1, layers), skipped):
        borders = [_ALWAYS if number in chosen else -_ALWAYS for number in range(layers)]
        found[chosen] = _lost(model, router, samples, borders)
    best = min(found, key=found.__getitem__)
    return best, found[best]


def _lost(
    model: LlamaForCausalLM,
    router: DepthRouter,
    samples: list[Tensor],
    threshold: float | list[float],
) -> float:
    """KL of the whole model's distributions to those behind the gates, over all positions."""
    losses = []
    for ids in samples:
        teacher = model.model(input_ids=ids, use_cache=False).last_hidden_state
        student, _ = passes(model, router, ids, threshold)
        weights = torch.ones(ids.shape, device=ids.device)
        losses.append(float(divergence(model, student, teacher, weights)))
    return sum(losses) / len(losses)


def _depth(
    model: LlamaForCausalLM,
    router: DepthRouter,
    samples: list[Tensor],
    threshold: float,
    layers: int,
) -> float:
    shares = [
        float((passes(model, router, ids, threshold)[1] > threshold).float().mean())
        for ids in samples
    ]
    return (1 + (layers - 1) * sum(shares) / len(shares)) / layers


def _quantile(scores: Tensor, share: float) -> Tensor:
    return scores.kthvalue(min(len(scores), max(1, round(share * len(scores)))))[0]


def main() -> None:
    """Train, find thresholds, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Llama in Hugging Face's form")
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file of the router")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--tiny", action="store_true", help="short sequences, small batches")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    model.requires_grad_(False)
    config = model.config
    router = DepthRouter(config.num_hidden_layers, config.hidden_size, config.rms_norm_eps)
    router.to(device)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    schedule = TINY if options.tiny else FULL
    batches = Batches(options.data, tokenizer, schedule)
    train(model, router, batches, schedule, options.seconds)

    length = schedule.phases[0][1]
    samples = [batches.take(length, length)[0].to(device)]
    found = []
    for depth in DEPTHS[4::6] if options.tiny else DEPTHS:
        threshold, reached, loss = threshold_at(model, router, samples, depth)
        found.append((depth, threshold))
        print(f"depth {depth}: threshold {threshold:.4f}, reached {reached:.3f}, KL {loss:.4f}")
    for skipped in (1,) if options.tiny else (1, 2, 4):
        chosen, loss = best_constant(model, router, samples, skipped)
        depth = 1 - skipped / config.num_hidden_layers
        print(f"depth {depth:.3f} of layers without {chosen}, for all tokens: KL {loss:.4f}")
    with torch.no_grad():
        router.weight[0], router.bias[0] = 0, _ALWAYS
    depths, thresholds = zip(*found, strict=True)
    tensors = {name: value.detach().cpu() for name, value in router.state_dict().items()}
    tensors |= {"depths": torch.tensor(depths), "thresholds": torch.tensor(thresholds)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out, metadata={"format": "pt"})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
