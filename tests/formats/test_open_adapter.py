"""Files of adapters from strangers: each is read as it is meant, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hmt.base.errors import AdapterError, HeaderError, HMTError, MissingFileError, ShapeError
from hmt.formats.adapters import open_adapter

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
AT = "base_model.model.model.layers.0.self_attn.q_proj."
PAIR = {f"{AT}lora_A.weight": torch.ones(2, 16), f"{AT}lora_B.weight": torch.ones(16, 2)}


def peft_folder(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(PAIR if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def gguf_file(path: Path, tensors: dict[str, np.ndarray], **metadata: Any) -> Path:
    said = {"architecture": "llama", "type": "adapter", "adapter": "lora", "alpha": 6.0} | metadata
    writer = gguf.GGUFWriter(path, said["architecture"])
    writer.add_type(said["type"])
    writer.add_string("adapter.type", said["adapter"])
    writer.add_float32("adapter.lora.alpha", said["alpha"])
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 5}}, 2.5),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 5, r".*\.q_proj": 1}}, 0.5),
        ({"r": 9, "rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 2}}, 3.0),
        ({"unknown": {"deep": [1]}, "target_modules": "all-linear"}, 3.0),
    ],
)
def test_scales_are_pefts(fields: dict[str, Any], scale: float, tmp_path: Path) -> None:
    (matrices,) = open_adapter(peft_folder(tmp_path / "own", **fields), {}).matrices
    assert matrices.module == "model.layers.0.self_attn.q_proj"
    assert matrices.scale == pytest.approx(scale)
    assert (matrices.rank, matrices.turned) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"peft_type": "LOHA"}, "type 'LOHA'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "biases"),
        ({"layer_replication": [[0, 1]]}, "repeats layers"),
        ({"r": 4}, "says 4"),
        ({"r": "many"}, "wanted is a number"),
        ({"lora_alpha": 1e300}, "wanted is a number"),
        ({"rank_pattern": ["q_proj"]}, "no map"),
        ({"rank_pattern": {"(": 2}}, "is not one"),
        ({"alpha_pattern": {"x" * 600: 2}}, "too long"),
        ({"rank_pattern": {"(?:(.)|(..)|(...)|(.))*(?=#)": 2}}, "take more than"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hmt.formats.adapters.peft._PATTERN_TIMEOUT_S", 0.1)
    with pytest.raises(AdapterError, match=told):
        open_adapter(peft_folder(tmp_path / "own", **fields), {})


@pytest.mark.parametrize(
    ("tensors", "error", "told"),
    [
        ({}, AdapterError, "no tensor"),
        ({f"{AT}lora_A.weight": torch.ones(2, 16)}, HeaderError, "lora_A alone"),
        (PAIR | {"base_model.model.lm_head.weight": torch.ones(2)}, AdapterError, "none of LoRA"),
        (PAIR | {f"{AT}lora_magnitude_vector": torch.ones(2)}, AdapterError, "none of LoRA"),
        (PAIR | {f"{AT}lora_B.weight": torch.ones(16, 3)}, ShapeError, r"\[16, 3\]"),
        (PAIR | {f"{AT}lora_A.weight": torch.ones(2)}, ShapeError, r"is \[2\]"),
        (PAIR | {f"{AT}lora_A.weight": torch.tensor(1.0)}, AdapterError, "rank 0"),
        (PAIR | {f"{AT}lora_A.weight": torch.ones(2, 16).double()}, AdapterError, "is F64"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(
    tensors: dict[str, torch.Tensor], error: type[HMTError], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        open_adapter(peft_folder(tmp_path / "own", tensors), {})


def test_ranks_have_a_bound(tmp_path: Path) -> None:
    tensors = {f"{AT}lora_A.weight": torch.ones(300, 2), f"{AT}lora_B.weight": torch.ones(2, 300)}
    with pytest.raises(AdapterError, match="1 to 256"):
        open_adapter(peft_folder(tmp_path / "own", tensors, r=300), {})


def test_folders_and_files_that_are_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        open_adapter(tmp_path / "none", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFileError, match="holds no adapter"):
        open_adapter(tmp_path / "empty", {})
    pickled = peft_folder(tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(MissingFileError, match="may run any code"):
        open_adapter(pickled, {})
    for content in ("[1]", "{", "[" * 100_000, '{"peft_type": "LORA"' + " " * (5 << 20) + "}"):
        (pickled / "adapter_config.json").write_text(content)
        with pytest.raises(HeaderError):
            open_adapter(pickled, {})
    cut = peft_folder(tmp_path / "cut")
    whole = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(HeaderError, match="truncated"):
        open_adapter(cut, {})


A, B = np.ones((2, 16), np.float32), np.ones((16, 2), np.float32)


def test_gguf_adapters_are_read_by_llama_cpps_names(tmp_path: Path) -> None:
    tensors = {
        "blk.1.attn_q.weight.lora_a": A, "blk.1.attn_q.weight.lora_b": B,
        "blk.1.ffn_down.weight.lora_a": A, "blk.1.ffn_down.weight.lora_b": B,
    }  # fmt: skip
    found = open_adapter(gguf_file(tmp_path / "own.gguf", tensors), LLAMA)
    assert {m.module: (m.turned, m.scale, m.rank) for m in found.matrices} == {
        "model.layers.1.self_attn.q_proj": (4, 3.0, 2),
        "model.layers.1.mlp.down_proj": (0, 3.0, 2),
    }


@pytest.mark.parametrize(
    ("tensors", "metadata", "told"),
    [
        ({}, {}, "no tensor"),
        (None, {"type": "model"}, "no LoRA adapter"),
        (None, {"adapter": "ia3"}, "no LoRA adapter"),
        (None, {"architecture": "gemma3"}, "the model is llama"),
        (None, {"architecture": "nothing"}, "reads no adapters"),
        (None, {"alpha": float("inf")}, "must be a number"),
        ({"blk.0.attn_q.weight.lora_a": A}, {}, "alone"),
        ({"blk.0.attn_q.weight": A}, {}, "none of an adapter's"),
        ({"blk.0.what.weight.lora_a": A, "blk.0.what.weight.lora_b": B}, {}, "no linear layer"),
        ({"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": A}, {}, "wanted are"),
        ({"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": A[None]}, {}, "experts"),
    ],
)
def test_gguf_files_that_are_no_adapters_of_the_model(
    tensors: dict[str, np.ndarray] | None, metadata: dict[str, Any], told: str, tmp_path: Path
) -> None:
    pair = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}
    path = gguf_file(tmp_path / "own.gguf", pair if tensors is None else tensors, **metadata)
    with pytest.raises(HMTError, match=told):
        open_adapter(path, LLAMA)
