"""Score a reference model with transformers, or recursions in plain torch; in BF16.

    python training/score.py CHECKPOINT --text assets/text/valid.txt [--out quality.json]
        [--depth 0.75] [--depth-router FILE] [--device cuda]

transformers' own FP8 loader needs a GPU, so FP8 tiles are turned into BF16 here.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from export import dequantize
from recursions import ARCHITECTURE, MixtureOfRecursions
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_router import DepthRouter, passes
from transformers import AutoConfig, PreTrainedModel
from typing_extensions import override

from hmt.bench import Extent, evaluate


class TransformersModel:
    """A transformers model, as hmt.bench.quality wants to ask it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Logits that follow `tokens[: row + 1]` for each row: f32 [rows, vocab]."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        wanted = torch.tensor(list(rows), device=self.model.device)
        return self.model.lm_head(states[wanted]).float().cpu()


class Recursions:
    """A mixture of recursions at one depth, asked in the same way.

    depths   layers that a token passed through on average, by sequence, of those that there are
    """

    def __init__(self, model: MixtureOfRecursions, depth: float) -> None:
        self.model = model
        known = model.config.recursion_thresholds
        self._thresholds = None if depth == 1 else known[str(depth)]
        self.depths: list[float] = []

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Logits that follow `tokens[: row + 1]` for each row: f32 [rows, vocab]."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        output = self.model.model(ids, thresholds=self._thresholds)
        self.depths.append(self.model.applications(output.active))
        wanted = torch.tensor(list(rows), device=self.model.device)
        return self.model.lm_head(output.last_hidden_state[0, wanted]).float().cpu()


class Routed(TransformersModel):
    """A Llama whose tokens skip layers by a depth router; `depths` as in `Recursions`."""

    def __init__(self, model: PreTrainedModel, router: Path, depth: float) -> None:
        super().__init__(model)
        stored = load_file(router, device=str(model.device))
        known = [round(one, 3) for one in stored.pop("depths").tolist()]
        thresholds = stored.pop("thresholds").tolist()
        self._threshold = thresholds[known.index(depth)] if depth < 1 else -math.inf
        self._router = DepthRouter(*stored["weight"].shape, model.config.rms_norm_eps)
        self._router.to(model.device).load_state_dict(stored)
        self.depths: list[float] = []

    @override
    @torch.no_grad()
    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Logits that follow `tokens[: row + 1]` for each row: f32 [rows, vocab]."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        states, scores = passes(self.model, self._router, ids, self._threshold)
        layers = len(scores) + 1
        passed = float((scores > self._threshold).float().mean())
        self.depths.append((1 + (layers - 1) * passed) / layers)
        wanted = torch.tensor(list(rows), device=self.model.device)
        return self.model.lm_head(states[0, wanted]).float().cpu()


def load(folder: Path, device: str = "cpu", depth: float = 1) -> TransformersModel | Recursions:
    """The checkpoint in `folder`, in BF16 on `device`, without its MTP layer."""
    if json.loads((folder / "config.json").read_text())["architectures"] == [ARCHITECTURE]:
        return Recursions(MixtureOfRecursions.load(folder).to(device), depth)
    config = AutoConfig.from_pretrained(folder)
    extra = f"model.layers.{config.get_text_config().num_hidden_layers}."
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    state = {
        name: dequantize(tensor, stored.get(f"{name}_scale_inv"))
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv") and not name.startswith(extra)
    }
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    family = getattr(transformers, config.architectures[0])
    model = family.from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16)
    return TransformersModel(model.to(device))


def main() -> None:
    """Measure by HMT's protocol, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--retrieval", default="2048x8,8192x4", help="LENGTHxSEQUENCES,...")
    parser.add_argument("--out", type=Path, help="write the scores here")
    parser.add_argument("--depth", type=float, default=1.0, help="layers passed, as a share")
    parser.add_argument("--depth-router", type=Path, help="what train_router.py wrote")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    pairs = (part.split("x") for part in options.retrieval.split(","))
    extent = Extent(retrieval={int(length): int(count) for length, count in pairs})
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    model = load(options.checkpoint, options.device, options.depth)
    if options.depth_router:
        model = Routed(model.model, options.depth_router, options.depth)
    quality = evaluate(
        model,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        options.text.read_text(encoding="utf-8"),
        extent,
    )
    version = ".".join(transformers.__version__.split(".")[:2])
    data = {
        "measured_with": f"transformers {version} on {options.device.upper()}, BF16 weights (FP8 "
        "blocks as BF16), by the protocol of hmt.bench.quality",
        **quality.as_json(),
    }
    if isinstance(model, Recursions | Routed):
        data["measured_with"] = "plain torch, by the protocol of hmt.bench.quality"
        data["depth"] = round(sum(model.depths) / len(model.depths), 3)
    print(json.dumps(data, indent=1))
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
