"""Models that probes run: layers of the trained embedded model, and others of random weights.

Random ones have the shapes of common families, so that kernels and Python do what they do there.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from hmt.profiling.random_model import Shape, write_random_model

FEW, MANY = 2, 8  # layers
_WEIGHTS = "model.safetensors"
# Layers of 30 and 28 MiB: what streams them passes more than most caches hold.
_WIDE = Shape(0, 1024, 4096, 8, 4, 128, tied=True)
_WIDE_EXPERTS = Shape(0, 1024, 512, 4, 2, 64, experts=8, experts_per_token=4, tied=True)
# Small for a GPU, with heads, vocabulary and expert counts of large models.
_DENSE = Shape(0, 512, 1024, 4, 2, 128, vocab_size=1 << 15, tied=True)
_EXPERTS = Shape(0, 512, 128, 4, 2, 128, 1 << 15, experts=64, experts_per_token=8, tied=True)


@contextmanager
def small_model(layers: int) -> Iterator[Path]:
    """The embedded model with so many of its layers, in a folder that is deleted at the end."""
    from safetensors.torch import load_file, save_file

    with as_file(files("hmt") / "embedded" / "mini-dense") as source, _folder() as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_WEIGHTS))
        config = json.loads((source / "config.json").read_text())
        beyond = tuple(f"model.layers.{n}." for n in range(layers, config["num_hidden_layers"]))
        config["num_hidden_layers"] = layers
        (folder / "config.json").write_text(json.dumps(config))
        weights = load_file(source / _WEIGHTS)
        save_file({k: v for k, v in weights.items() if not k.startswith(beyond)}, folder / _WEIGHTS)
        yield folder


def wide_model(layers: int) -> AbstractContextManager[Path]:
    """Dense layers of random weights, of Llama's family, 30 MiB each."""
    return _random_model(layers, _WIDE)


def wide_experts(layers: int) -> AbstractContextManager[Path]:
    """A mixture of 8 experts with random weights, of Qwen3's family, 28 MiB a layer."""
    return _random_model(layers, _WIDE_EXPERTS)


def dense_model(layers: int) -> AbstractContextManager[Path]:
    """For a GPU: as `wide_model`, smaller."""
    return _random_model(layers, _DENSE)


def expert_model(layers: int) -> AbstractContextManager[Path]:
    """For a GPU: 64 experts, 8 of them chosen."""
    return _random_model(layers, _EXPERTS)


@contextmanager
def _random_model(layers: int, shape: Shape) -> Iterator[Path]:
    with _folder() as folder:
        write_random_model(folder, replace(shape, layers=layers))
        yield folder


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hmt-probe-") as name:
        yield Path(name)
