"""What rounding activations costs, on GGUF files: HMT by default and exact, and llama.cpp.

    python benchmarks/activation_quality.py FOLDER RESULTS.json [MODEL.gguf ...]

Each engine scores the same held-out text in windows of 512 tokens.  For the reference models, which
llama.cpp's quantiser writes to FOLDER in each type, the truth is the same model in f32.  For a
published MODEL, of which there is no f32 file, it is HMT's exact computation of the file.  Written
are the perplexity, and the mean and the 99th percentile of the divergence KL(truth || engine) of
the next token's distribution, in nats.
"""

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import torch

_ROOT = Path(__file__).resolve().parent.parent
_WINDOW, _WINDOWS = 512, 4
_TYPES = {
    "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K_M", "Q4_K_M": "Q4_K_M", "Q4_0": "Q4_0",
    "IQ4_XS": "IQ4_XS", "Q3_K_M": "Q3_K_M", "IQ3_S": "IQ3_S", "Q2_K": "Q2_K",
}  # fmt: skip

Windows = list[list[int]]


def _hmt(path: Path, windows: Windows, **options: Any) -> Iterator[torch.Tensor]:
    """Logits of each window, f32 [tokens, vocab]."""
    from hmt.engine import Engine

    with Engine(context=_WINDOW, max_batch=1, dtype="float32", **options) as engine:
        model = engine.load_model(path)
        for window in windows:
            yield model.logits(window, range(len(window))).float()


def _llama_cpp(path: Path, windows: Windows) -> Iterator[torch.Tensor]:
    model = llama_cpp.Llama(str(path), n_ctx=_WINDOW, logits_all=True, verbose=False)
    try:
        for window in windows:
            model.reset()
            model.eval(window)
            yield torch.from_numpy(model.scores[: len(window)].copy())
    finally:
        model.close()


def _windows(path: Path) -> Windows:
    """Of the held-out text, in the file's own tokens."""
    from hmt.engine import Engine

    text = (_ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")
    with Engine(context=_WINDOW, max_batch=1) as engine:
        ids = list(engine.load_model(path).tokenizer.encode(text[: 16 * _WINDOW * _WINDOWS]))
    return [ids[at : at + _WINDOW] for at in range(0, _WINDOW * _WINDOWS, _WINDOW)]


def _scores(
    truth: list[torch.Tensor], logits: Iterator[torch.Tensor], windows: Windows
) -> dict[str, float]:
    apart, losses = [], []
    for exact, found, window in zip(truth, logits, windows, strict=True):
        wanted, given = (one.double().log_softmax(-1) for one in (exact, found))
        apart.append((wanted.exp() * (wanted - given)).sum(-1))
        following = torch.tensor(window[1:])[:, None]
        losses.append(-given[:-1].gather(1, following)[:, 0])
    divergence, loss = torch.cat(apart), torch.cat(losses)
    return {
        "kl_mean": float(divergence.mean()),
        "kl_99": float(divergence.quantile(0.99)),
        "perplexity": float(loss.mean().exp()),
    }


def _measured(name: str, kind: str, path: Path, truth: Path) -> dict[str, Any]:
    windows = _windows(path)
    exact = list(_hmt(truth, windows, activations="exact"))
    engines = {
        "HMT": _hmt(path, windows),
        "HMT, exact": _hmt(path, windows, activations="exact"),
        "llama.cpp": _llama_cpp(path, windows),
    }
    scores = {engine: _scores(exact, logits, windows) for engine, logits in engines.items()}
    print(name, kind, {engine: round(one["kl_mean"], 6) for engine, one in scores.items()})
    gc.collect()
    return {"model": name, "type": kind, "tokens": _WINDOW * _WINDOWS, "engines": scores}


def main() -> int:
    """Write what is not there yet, and measure all."""
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    folder, results, *published = map(Path, sys.argv[1:])
    sys.path.insert(0, str(_ROOT / "benchmarks"))
    from hmt.bench.environment import describe
    from hmt.hardware.machine import machine_for
    from published_formats import models, numbers, write_gguf

    found = []
    for name, model in models().items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        write_gguf(target, model, numbers(model)[0], _TYPES)
        for kind in _TYPES:
            found.append(_measured(name, kind, target / f"GGUF {kind}.gguf", target / "f32.gguf"))
    for path in published:
        found.append(_measured(path.stem, "as published", path, path))
    content = {
        "benchmark": "activation quality",
        "measured_on": describe(machine_for(folder)),
        "llama_cpp": llama_cpp.__version__,
        "results": found,
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
