"""Checkpoints of families with delta attention under the names that they were published with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hybrid_models import ids, publish
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hmt
from hmt.base.errors import CheckpointError
from hmt.models import open_model

# What transformers writes -> what was published.
OLMO = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
KIMI = {".0.block_sparse_moe.": ".0.mlp."}  # the first layer's network is dense
# As transformers' modules call what it writes as it was published.
GLM = {
    ".self_attn.f_": ".self_attn.forget_gate.f_",
    ".self_attn.dt_bias": ".self_attn.forget_gate.dt_bias",
    ".self_attn.A_log": ".self_attn.forget_gate.A_log",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
}


def as_published(folder: Path, names: dict[str, str], widths: tuple[int, int, int]) -> None:
    """Rename tensors, and divide convolutions where queries, keys and values begin."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for written, own in names.items():
            name = name.replace(written, own)
        tensors[name] = tensor
    for name in [name for name in tensors if ".q_conv1d." in name]:
        parts = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        whole = torch.cat([tensors[part] for part in parts])
        for part, rows in zip(parts, whole.split(widths), strict=True):
            tensors[part] = rows.clone()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "names"),
    [("olmo_hybrid-0", OLMO), ("kimi_linear-0", KIMI), ("glm5_next_text-0", GLM)],
    ids=["olmo", "kimi", "glm"],
)
def test_published_names_and_parts(name: str, names: dict[str, str], tmp_path: Path) -> None:
    """As written by transformers, and as published: which transformers reads alike."""
    config = publish(name, tmp_path / "written", 128).config
    shutil.copytree(tmp_path / "written", tmp_path / "published")
    if name.startswith("olmo"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        widths = (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim)
        assert keys != widths[2]
    else:
        widths = (config.linear_num_heads * config.linear_head_dim,) * 3
    as_published(tmp_path / "published", names, widths)
    tokens, found = ids(20), []
    for folder in ("written", "published"):
        with hmt.Engine(dtype="float32", host_memory="64MiB", context=64) as engine:
            found.append(engine.load_model(tmp_path / folder).logits(tokens, range(20)))
    assert torch.equal(*found)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found[0], wanted, atol=1e-4 * max(1, float(wanted.std())), rtol=0)


def test_rotary_dim_of_minimax(tmp_path: Path) -> None:
    """As transformers with heads in another order, where the numbers that do not turn have pairs.

    transformers itself knows no such field; MiniMax' own code does.
    """
    reference = publish("minimax-0", tmp_path, 128)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["head_dim"] == 8
    file.write_text(json.dumps(config | {"rotary_dim": 4}))
    tokens = ids(30)
    with hmt.Engine(dtype="float32", host_memory="64MiB", context=64) as engine:
        found = engine.load_model(tmp_path).logits(tokens, range(30))
    usual = reference.model.rotary_emb.inv_freq
    with torch.inference_mode():
        whole = reference(torch.tensor([tokens])).logits[0]
        theta = config["rope_parameters"]["rope_theta"]
        usual.copy_(torch.tensor([1.0, theta**-0.5, 0.0, 0.0]))
        for layer in reference.model.layers:
            if layer.block_type == "full_attention":
                for own in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                    # Pairs are 0 and 4, 1 and 5 here; 0 and 2, 1 and 3 there.
                    heads = own.unflatten(0, (-1, 8))[:, [0, 1, 4, 6, 2, 3, 5, 7]]
                    own.copy_(heads.flatten(0, 1))
        wanted = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1, float(wanted.std())), rtol=0)
    assert float((whole - wanted).abs().max()) > 0.01, "what this is about"
    file.write_text(json.dumps(config | {"rotary_dim": 3}))
    with pytest.raises(CheckpointError, match="rotary_dim is 3"):
        open_model(json.loads(file.read_text()), tmp_path, torch.float32)


def test_all_matrices_may_be_published_in_fp8(tmp_path: Path) -> None:
    """Those as well that are multiplied with as they are: of decays, and of an indexer."""
    publish("glm5_next_text-0", tmp_path / "numbers", 128)
    shutil.copytree(tmp_path / "numbers", tmp_path / "published")
    side, stored = 16, {}
    numbers = load_file(tmp_path / "numbers" / "model.safetensors")
    for name, matrix in list(numbers.items()):
        stored[name] = matrix
        layer = ".self_attn." in name or ".mlp." in name
        if not layer or matrix.ndim != 2 or not name.endswith(".weight") or ".mlp.gate." in name:
            continue
        tiles = [-(-size // side) for size in matrix.shape]
        scales = torch.rand(tiles, generator=torch.Generator().manual_seed(len(name))) + 0.5
        full = scales.repeat_interleave(side, 0).repeat_interleave(side, 1)
        full = full[: matrix.shape[0], : matrix.shape[1]]
        stored[name] = (matrix / full).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        numbers[name] = stored[name].float() * full
    for folder, tensors in (("numbers", numbers), ("published", stored)):
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
    file = tmp_path / "published" / "config.json"
    fp8 = {"quant_method": "fp8", "weight_block_size": [side, side]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": fp8}))
    tokens, found = ids(40), []
    for folder in ("numbers", "published"):
        options = {"dtype": "float32", "host_memory": "64MiB", "context": 64}
        with hmt.Engine(**options, activations="exact") as engine:
            found.append(engine.load_model(tmp_path / folder).logits(tokens, range(40)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)
