"""`hmt inspect`: what files hold, also of what cannot be run."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hmt.cli.options import embedded_model

MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"


def inspected(hmt, *words):
    done = hmt("inspect", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_embedded_model(hmt):
    found = inspected(hmt)
    plan = json.loads(hmt("plan", "--json").out)
    assert (found["architecture"], found["layers"]) == (plan["architecture"], plan["layers"])
    assert found["published_bytes"] == plan["published_bytes"]
    assert sum(one["nbytes"] for one in found["stored"]) == plan["published_bytes"]
    assert {one["bits"] for one in found["stored"]} == {16.0}
    assert {one["kind"] for one in found["stored"]} == {"attention", "ffn", "head"}
    assert found["kv_tokens_per_gib"] == (1 << 30) // found["kv_token_bytes"]
    assert not found["problem"] and not found["missing"] and not found["extra"]
    shown = hmt("inspect").out
    assert "LlamaForCausalLM" in shown and "16.00" in shown and "largest block: " in shown


def test_fp8_experts(hmt):
    found = inspected(hmt, MINI_MOE)
    [experts] = [one for one in found["stored"] if one["kind"] == "expert"]
    assert experts["encoding"] == "fp8-block, tiles of 128 x 128"
    assert 8 < experts["bits"] < 8.01
    assert experts["kernel"] and not found["extra"]


def test_a_pack(hmt, tmp_path):
    assert hmt("convert", embedded_model(), tmp_path / "pack", "--quant", "w4a8").code == 0
    found = inspected(hmt, tmp_path / "pack")
    assert found["is_pack"]
    bits = {(one["kind"], one["encoding"]): one["bits"] for one in found["stored"]}
    assert bits["ffn", "int4, groups of 32"] == 4.5
    assert 8 < bits["head", "int8"] < 8.2


@pytest.fixture
def damaged(tmp_path):
    """The embedded model with a tensor too few and one too many."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    [shard] = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, shard)
    return folder


def test_what_is_missing_and_what_is_not_used(hmt, damaged):
    found = inspected(hmt, damaged)
    assert found["missing"] == ["model.norm.weight"]
    assert "needs tensor model.norm.weight" in found["problem"]
    assert [one["encoding"] for one in found["stored"]] == ["bf16"]
    [shard] = damaged.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.norm.weight"] = tensors["other.weight"].clone()
    save_file(tensors, shard)
    assert inspected(hmt, damaged)["extra"] == ["other.weight"]


def test_what_cannot_be_run_is_described_all_the_same(hmt, damaged):
    config = json.loads((damaged / "config.json").read_text())
    config |= {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}
    (damaged / "config.json").write_text(json.dumps(config))
    found = inspected(hmt, damaged)
    assert "keeps nothing of earlier tokens" in found["problem"]
    assert found["stored"][0]["kind"] == "tensors"
    assert "it cannot be run" in hmt("inspect", damaged).out
    assert hmt("inspect", damaged / "none").code == 1
