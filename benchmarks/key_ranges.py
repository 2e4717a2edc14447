"""What ranges of keys gain, measured with the engine itself on long contexts.

    python benchmarks/key_ranges.py RESULTS.json [LENGTH ...]

mini-dense reads windows of held-out text.  12% of the pages are kept as they are, the others as
keys and values of 4 or 8 bits on the disk, from where every further part of the prompt reads them
again; with the ranges of `hmt calibrate kv --length LENGTH` beside the weights, and without.
Written is the divergence KL(all pages exact || this) of next tokens over the second half of the
windows, in nats, and the perplexity there.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hmt.bench.environment import describe
from hmt.engine import Engine
from hmt.engine.api import LoadedModel
from hmt.engine.loading.kv_scales import SCALES, calibrate, identity
from hmt.quantizing import calibration_sequences
from hmt_bench.kv_quality import DEVICE_SHARE, KVMemory, Setting

_ROOT = Path(__file__).resolve().parent.parent
_MODEL = _ROOT / "src" / "hmt" / "embedded" / "mini-dense"
_LENGTHS, _TOKENS, _CALIBRATION_TOKENS = (2048, 4096, 8192), 16384, 32768
# The first differs by the order of sums alone: what is below it cannot be told apart.
_KEPT = ("cold:exact", "cold:int8", "cold:int4")


@contextmanager
def _opened(folder: Path, kept: str, length: int, pages: Path) -> Iterator[LoadedModel]:
    """The model in `folder`, with all pages exact ("full") or kept so."""
    given: dict[str, Any] = {"host_memory": "2GiB", "max_batch": 1, "context": length}
    with Engine(**given) as engine:
        prepared = engine.load_model(folder).prepared
    memory = KVMemory.of(Setting.parse(kept), length, DEVICE_SHARE, prepared, {})
    with Engine(**given | memory.options(pages)) as engine:
        yield engine.load_model(folder)


def _distributions(model: LoadedModel, windows: list[list[int]]) -> list[torch.Tensor]:
    rows = [range(len(window) // 2, len(window)) for window in windows]
    pairs = zip(windows, rows, strict=True)
    return [model.logits(window, those).double().log_softmax(-1) for window, those in pairs]


def _scores(
    exact: list[torch.Tensor], found: list[torch.Tensor], windows: list[list[int]]
) -> dict[str, float]:
    apart, losses = [], []
    for wanted, given, window in zip(exact, found, windows, strict=True):
        apart.append((wanted.exp() * (wanted - given)).sum(-1))
        following = torch.tensor(window[len(window) // 2 + 1 :])[:, None]
        losses.append(-given[:-1].gather(1, following)[:, 0])
    return {
        "kl": float(torch.cat(apart).mean()),
        "perplexity": float(torch.cat(losses).mean().exp()),
    }


def measure(length: int, text: str) -> dict[str, Any]:
    """One length: scores of every form, with ranges and without."""
    with tempfile.TemporaryDirectory(prefix="hmt-ranges-") as name:
        plain, ranged = Path(name) / "plain", Path(name) / "ranged"
        for folder in (plain, ranged):
            folder.mkdir()
            for file in _MODEL.iterdir():
                (folder / file.name).symlink_to(file)
        with _opened(plain, "full", length, Path(name)) as model:
            ids = model.tokenizer.encode(text)
            count = max(1, _TOKENS // length)
            windows = [ids[at * length : (at + 1) * length] for at in range(count)]
            exact = _distributions(model, windows)
            pieces = calibration_sequences(
                "builtin", model.tokenizer, _CALIBRATION_TOKENS // length, length
            )
            calibrate(model, pieces).scales.write(ranged / SCALES, identity(model.prepared.source))
            machine = describe(model.prepared.machine)
        rows = [{"kept": "full", "ranges": False, **_scores(exact, exact, windows)}]
        for kept in _KEPT:
            for folder in (plain,) if kept == "cold:exact" else (plain, ranged):
                with _opened(folder, kept, length, Path(name)) as model:
                    found = _distributions(model, windows)
                rows.append(
                    {"kept": kept, "ranges": folder is ranged, **_scores(exact, found, windows)}
                )
    return {"length": length, "windows": len(windows), "rows": rows, "machine": machine}


def main() -> int:
    """Measure, and write after each length."""
    results = Path(sys.argv[1])
    lengths = [int(length) for length in sys.argv[2:]] or _LENGTHS
    text = (_ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = []
    for length in lengths:
        found.append(measure(length, text))
        print(
            length, [(r["kept"], r["ranges"], round(1000 * r["kl"], 2)) for r in found[-1]["rows"]]
        )
        machine = found[-1].pop("machine")
        content = {"model": _MODEL.name, "machine": machine, "results": found}
        results.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
