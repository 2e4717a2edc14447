"""The GGUF file holds the checkpoint's numbers, where llama.cpp looks for them."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hmt.base.errors import CheckpointError, MachineError
from hmt.contracts.checkpoint import Checkpoint
from hmt.formats import open_checkpoint
from hmt.profiling.random_model import Shape
from hmt_bench.four_bits import write_four_bit_model
from hmt_bench.gguf_model import gguf_tensors, load_gguf, write_gguf

LLAMA = Shape(2, 64, 96, 4, 2, vocab_size=128)
QWEN = Shape(2, 64, 32, 4, 2, 32, vocab_size=96, experts=4, experts_per_token=2)
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def gguf() -> Any:
    return pytest.importorskip("gguf")


@pytest.fixture(scope="module", params=[LLAMA, QWEN], ids=["llama", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    write_four_bit_model(path, request.param)
    write_gguf(path, path / "model.gguf")
    return path


def published(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    return found


def written(folder: Path, gguf: Any) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }


def test_matrices_lose_nothing(folder: Path, gguf: Any) -> None:
    ours, theirs = published(folder), written(folder, gguf)
    for name, source in {
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    }.items():
        want = ours[f"model.layers.1.{source}.weight"].numpy()
        np.testing.assert_array_equal(theirs[f"blk.1.{name}.weight"], want)
    head = ours["lm_head.weight"].numpy()
    np.testing.assert_allclose(theirs["output.weight"], head, atol=2**-4 / 254 * 1.001)


def test_queries_are_turned_for_llama_only(folder: Path, gguf: Any) -> None:
    """Row d of a head: llama.cpp pairs 2 i with 2 i + 1, the checkpoint i with i + half."""
    is_llama = open_checkpoint(folder).config["model_type"] == "llama"
    ours, theirs = published(folder), written(folder, gguf)
    for name, source, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        want = ours[f"model.layers.0.self_attn.{source}.weight"].numpy()
        rows = want.shape[0] // heads
        order = [rows // 2 * (d % 2) + d // 2 if is_llama else d for d in range(rows)]
        for head in range(heads):
            got = theirs[f"blk.0.{name}.weight"][head * rows : (head + 1) * rows]
            np.testing.assert_array_equal(got, want[head * rows : (head + 1) * rows][order])


def test_experts_are_stacked(folder: Path, gguf: Any) -> None:
    ours, theirs = published(folder), written(folder, gguf)
    stacks = [name for name in theirs if "_exps" in name]
    if open_checkpoint(folder).config["model_type"] == "llama":
        assert not stacks
        return
    assert len(stacks) == 3 * QWEN.layers
    for kind in ("gate", "up", "down"):
        want = [ours[f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight"] for e in range(4)]
        np.testing.assert_array_equal(theirs[f"blk.1.ffn_{kind}_exps.weight"], torch.stack(want))
    router = ours["model.layers.0.mlp.gate.weight"].numpy()
    np.testing.assert_array_equal(theirs["blk.0.ffn_gate_inp.weight"], router)


def test_nothing_is_missing(folder: Path, gguf: Any) -> None:
    checkpoint = open_checkpoint(folder)
    tensors = gguf_tensors(checkpoint)
    sources = [record.name for tensor in tensors for record in tensor.sources]
    assert sorted(sources) == sorted(checkpoint.records)
    reader = gguf.GGUFReader(folder / "model.gguf")
    assert [t.name for t in reader.tensors] == [t.name for t in tensors]
    assert [int(t.n_bytes) for t in reader.tensors] == [t.nbytes for t in tensors]


def test_a_token_reads_only_the_experts_it_chose(folder: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf_tensors(open_checkpoint(folder))}
    assert tensors["token_embd.weight"].used == 1 / tensors["token_embd.weight"].shape[0]
    assert {t.used for name, t in tensors.items() if "_exps" in name} <= {0.5}
    assert tensors["blk.0.attn_q.weight"].used == 1


def test_sizes_are_told(folder: Path, gguf: Any) -> None:
    fields = gguf.GGUFReader(folder / "model.gguf").fields
    arch = fields["general.architecture"].contents()
    config = open_checkpoint(folder).config
    for key, name in {
        "embedding_length": "hidden_size",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "vocab_size": "vocab_size",
    }.items():
        assert fields[f"{arch}.{key}"].contents() == config[name]
    if arch == "qwen3moe":
        assert fields["qwen3moe.expert_used_count"].contents() == QWEN.experts_per_token


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gemma3"):
        gguf_tensors(Checkpoint(tmp_path, {"model_type": "gemma3"}, {}))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MachineError, match="pip install 'gguf"):
        load_gguf()
    assert importlib.import_module("hmt_bench.gguf_model") is not None
