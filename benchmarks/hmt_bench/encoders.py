"""Encoders of images on the CPU, beside transformers' own in the same process, in turns.

Both have the same random weights and encode the same picture, one after the other, so that what
else the machine does is alike for both.  Who is first changes from round to round: the first finds
memory that the system has to clear, twice as many pages of it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from hmt.bench.environment import describe
from hmt.engine import Engine
from hmt_bench.random_vision import SHAPES, picture, written

_TEXT: Final = {"num_hidden_layers": 1, "intermediate_size": 256, "vocab_size": 1024}


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured.

    shapes   of SHAPES
    dtypes   "bfloat16", "float32"
    layers   of the encoder
    side     pixels in each direction
    """

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    layers: int = 4
    side: int = 1024
    rounds: int = 5


def run(
    folder: Path, task: Task, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Measure; checkpoints are kept in `folder`."""
    results = []
    machine: dict[str, Any] = {}
    for name in task.shapes:
        whole = SHAPES[name]
        shape = replace(whole, text=whole.text | _TEXT, vision=whole.with_layers(task.layers))
        progress(f"writing {name}")
        model = written(folder / f"{name}-encoder-{task.layers}", shape)
        for dtype in task.dtypes:
            progress(f"{name} in {dtype}")
            found, machine = _compared(model, shape.architecture, task, dtype)
            results.append({"shape": name, "dtype": dtype} | found)
    return {
        "benchmark": "encoders",
        "machine": machine,
        "task": asdict(task),
        "results": results,
    }


@torch.inference_mode()
def _compared(
    folder: Path, architecture: str, task: Task, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds of each round, of HMT and of transformers; and what the machine is."""
    import transformers

    kind = getattr(transformers, architecture)
    peer = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    options: dict[str, Any] = {"host_memory": "6GiB", "context": 4096, "max_batch": 1}
    options |= {"check_weights": False, "speculate": "off", "dtype": dtype}
    ours: list[float] = []
    theirs: list[float] = []
    with Engine(**options) as engine:
        model = engine.load_model(folder)
        store = model._core.memory.images
        assert store is not None, model.summary().notes
        encoder: Any = store._encoder
        for number in range(task.rounds + 1):
            (image,), hold = store.hold([picture(task.side, number)])
            given = {k: v.to(peer.dtype) if v.is_floating_point() else v
                     for k, v in image.inputs.items()}  # fmt: skip
            taken: dict[str, float] = {}
            for who in ("hmt", "transformers") if number % 2 else ("transformers", "hmt"):
                begin = time.perf_counter()
                if who == "hmt":
                    features = store.features(image.key).rows
                else:
                    out = peer.get_image_features(**given, return_dict=True).pooler_output
                taken[who] = time.perf_counter() - begin
            if number:  # the first reads the weights
                ours.append(taken["hmt"])
                theirs.append(taken["transformers"])
            patches = encoder._sizes.patches(image.inputs)
            del hold
        machine = describe(model.prepared.machine)
    rows = out if isinstance(out, torch.Tensor) else torch.cat(list(out))
    rows = rows.reshape(features.shape).float()
    return {
        "patches": patches,
        "tokens": len(features),
        "encoded_s": median(ours),
        "transformers_s": median(theirs),
        "ratio": median(a / b for a, b in zip(ours, theirs, strict=True)),
        "rounds": {"encoded_s": ours, "transformers_s": theirs},
        "difference_of_features": float((features.float() - rows).norm() / rows.norm()),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }, machine
