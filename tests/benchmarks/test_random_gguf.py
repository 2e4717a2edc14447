"""Random GGUF files decode as real ones do: weights around 0, and experts chosen by the token."""

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

import hmt
from hmt.formats.gguf import FILE_TYPES
from hmt.profiling.random_model import Shape
from hmt_bench import random_gguf
from hmt_bench.gguf_model import block_of
from hmt_bench.random_gguf import write_random_gguf

MIXTURE = Shape(6, 256, 256, heads=4, kv_heads=2, experts=32, experts_per_token=4, vocab_size=4096)
TOKENS = 48
SMALLER = 1 << 20  # of the pattern, for speed


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_matrices_deviate_from_0_alike_in_all_types(
    file_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_gguf, "_PATTERN_BYTES", SMALLER)
    file = tmp_path / "model.gguf"
    write_random_gguf(file, Shape(1, 256, 512, heads=4, kv_heads=2, vocab_size=512), file_type)
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "token_embd.weight" or tensor.tensor_type.name == "F32":
            continue
        count, size = block_of(tensor.tensor_type.name)
        blocks = tensor.data.reshape(-1).view(np.uint8).reshape(-1, size)
        numbers = gguf.dequantize(blocks, tensor.tensor_type)
        assert numbers.size == len(blocks) * count
        assert 0.015 < numbers.std() < 0.025, (tensor.name, tensor.tensor_type.name)
        assert abs(numbers.mean()) < 0.002, (tensor.name, tensor.tensor_type.name)


def test_each_token_has_its_own_experts_behind_all_layers(tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "model.gguf", MIXTURE, "Q4_K_M")
    trace = tmp_path / "routes"
    with hmt.Engine(gpus=None, max_batch=1, context=128, expert_trace=trace) as engine:
        model = engine.load_model(str(tmp_path / "model.gguf"))
        model.infer(hmt.Request([5, 3, 8], TOKENS, ignore_eos=True))
    routes: dict[int, list[set[int]]] = {}
    for line in trace.read_text().splitlines()[1:]:
        record = json.loads(line)
        routes.setdefault(record["layer"], []).extend(map(set, record["experts"]))
    assert len(routes) == MIXTURE.layers
    for layer, chosen in routes.items():
        assert len(set.union(*chosen)) > 0.9 * MIXTURE.experts, layer
        # Of 4 of 32 experts, chance gives half an expert to two tokens.
        common = [len(one & other) for one, other in itertools.pairwise(chosen)]
        assert sum(common) / len(common) < 1.5, layer
