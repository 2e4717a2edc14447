"""llama.cpp's benchmark program as a peer: the file it is given, and what it is asked."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import hmt
from hmt.base.errors import MachineError
from hmt.profiling.random_model import Shape
from hmt_bench.gpu import SHAPES, llama_cpp
from hmt_bench.llama_bench import LlamaBench, rates_of
from hmt_bench.random_gguf import write_random_gguf
from hmt_bench.random_hybrid import DeltaShape

gguf = pytest.importorskip("gguf")

SPARSE = Shape(2, 64, 32, 4, 2, 32, vocab_size=96, experts=8, experts_per_token=2)
SAYS = json.dumps([{"n_gen": 8, "avg_ts": 10.0, "samples_ts": [9.0, 11.0, 10.0]}])


@pytest.mark.parametrize("shape", [SHAPES["small"], SPARSE])
def test_the_file_is_what_the_shape_says(shape: Shape, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    nbytes = write_random_gguf(path, shape)
    reader = gguf.GGUFReader(path)
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == nbytes
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    head = by_name["output.weight"]
    assert head.shape.tolist() == [shape.hidden_size, shape.vocab_size]
    names = ("attn_q", "ffn_down_exps" if shape.experts else "ffn_down")
    for name in names:
        tensor = by_name[f"blk.0.{name}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all() and 0.001 < values.std() < 0.1
    assert len([n for n in by_name if n.endswith("attn_q.weight")]) == shape.layers


@pytest.mark.parametrize("experts", [0, 8])
def test_a_hybrid_of_random_numbers_runs(experts: int, tmp_path: Path) -> None:
    shape = DeltaShape(
        4, 256, 256, 4, 2, 2, 4, 64, 64, vocab_size=4096, experts=experts,
        experts_per_token=min(2, experts),
    )  # fmt: skip
    path = tmp_path / "model.gguf"
    nbytes = write_random_gguf(path, shape, "Q4_K_M")
    reader = gguf.GGUFReader(path)
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == nbytes
    with hmt.Engine(host_memory="512MiB", context=64) as engine:
        logits = engine.load_model(path).logits(list(range(2, 50)), [10, 47])
    assert logits.isfinite().all() and logits.std() > 0


def program(folder: Path, says: str, status: int = 0) -> Path:
    """Something that notes how it was called."""
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/asked\necho '{says}'\nexit {status}\n")
    os.chmod(path, 0o755)
    return path


def test_runs_are_handed_out_one_by_one(tmp_path: Path) -> None:
    peer = llama_cpp(program(tmp_path, SAYS), tmp_path)(SHAPES["small"], 1 << 30, True)
    assert [peer.decode_rate(1, 8) for _ in range(4)] == [9.0, 11.0, 10.0, 9.0]
    assert peer.prompt_rate(100) == 9.0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 and all("-fitt 0" in line for line in asked)
    assert "-p 0 -n 8" in asked[0] and "-p 100 -n 0" in asked[2]
    with pytest.raises(RuntimeError, match="one sequence"):
        peer.decode_rate(2, 8)
    peer.close()


def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="--llama-bench"):
        LlamaBench(tmp_path / "none", tmp_path, SHAPES["small"], 1 << 30)
    peer = LlamaBench(program(tmp_path, "no model", 3), tmp_path, SHAPES["small"], 1 << 30)
    with pytest.raises(RuntimeError, match="llama-bench failed"):
        peer.decode_rate(1, 8)
    assert rates_of(SAYS) == [9.0, 11.0, 10.0]
