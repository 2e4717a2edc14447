"""GGUF files answer as a checkpoint of the same numbers does, whatever they were rounded to."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf_files import KINDS, ModelFile, bytes_vocabulary
from reference import MINI_DENSE
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import hmt
from hmt.base.errors import MissingFileError
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.inspection import inspect
from hmt.engine.loading.packs import convert, verify
from hmt.engine.loading.source import open_source
from hmt.engine.loading.what_if import scenario_of, scenarios_for
from hmt.formats import open_checkpoint
from hmt.hardware.machine import machine_for
from hmt.planner import PlanOptions, smallest_budget

ARCH = gguf.MODEL_ARCH
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "long_factor": [1.0 + 0.5 * n for n in range(8)],
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[gguf.MODEL_ARCH, str, dict[str, Any]]] = {
    "llama": (ARCH.LLAMA, "llama", {"tie_word_embeddings": True, "attention_bias": False}),
    "llama3": (ARCH.LLAMA, "llama", {"rope_parameters": LLAMA3}),
    "mixtral": (ARCH.LLAMA, "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": (ARCH.QWEN2, "qwen2", {}),
    "qwen3": (ARCH.QWEN3, "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": (
        ARCH.QWEN3MOE,
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 5, "norm_topk_prob": True, **EXPERTS},
    ),
    "gemma3": (
        ARCH.GEMMA3,
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6, "num_hidden_layers": 7,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gpt-oss": (
        ARCH.GPT_OSS,
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 6,
         "rope_parameters": {"rope_theta": 5000.0, **YARN, "truncate": False}},
    ),
    "phi3": (ARCH.PHI3, "phi3", {"original_max_position_embeddings": 128}),
    "phi3-long": (
        ARCH.PHI3, "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "deepseek2-v2": (
        ARCH.DEEPSEEK2,
        "deepseek_v2",
        {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
         "norm_topk_prob": False},
    ),
    "deepseek2-v3": (
        ARCH.DEEPSEEK2,
        "deepseek_v3",
        {**LATENT, "n_group": 2, "topk_group": 1,
         "rope_parameters": {"rope_theta": 5000.0, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen2vl": (ARCH.QWEN2VL, "qwen2", {}),
    "qwen3vl": (ARCH.QWEN3VL, "qwen3", {"head_dim": 32}),
    "qwen3vlmoe": (
        ARCH.QWEN3VLMOE,
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 5, "norm_topk_prob": True, **EXPERTS},
    ),
}  # fmt: skip


def random_model(name: str, folder: Path, *kinds: str, **others: Any) -> ModelFile:
    """A random model of one architecture, in types that are drawn from `kinds`."""
    arch, model_type, fields = CASES[name]
    seed = list(CASES).index(name)
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**(SIZES | fields | others))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in key and tensor.is_floating_point():
                noise = torch.randn(tensor.shape)
                tensor.copy_(tensor + 0.3 * noise if "norm" in key else 0.15 * noise)
    model.save_pretrained(folder / "plain")
    config.architectures = json.loads((folder / "plain" / "config.json").read_text())[
        "architectures"
    ]
    rng = random.Random(seed)
    file = ModelFile(arch, config, lambda tensor: rng.choice(kinds or KINDS))
    file.add(load_file(folder / "plain" / "model.safetensors"))
    return file


PROMPT = torch.randint(8, 4000, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def answer(path: Path, **options: Any) -> tuple[tuple[int, ...], torch.Tensor, int]:
    """Greedy tokens, logits, and bytes that were streamed."""
    with hmt.Engine(context=128, dtype="float32", activations="exact", **options) as engine:
        model = engine.load_model(path)
        found = model.infer(hmt.Request(PROMPT, 24, ignore_eos=True))
        return found.token_ids, model.logits(PROMPT, range(40)), model.summary().streamed_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_answers_as_the_same_numbers_do(name: str, tmp_path: Path) -> None:
    file = random_model(name, tmp_path)
    path = file.write(tmp_path / "model.gguf", bytes_vocabulary(MINI_DENSE))
    checkpoint = file.write_checkpoint(tmp_path / "checkpoint", MINI_DENSE)
    tokens, logits, _ = answer(checkpoint)
    found, near, _ = answer(path)
    assert found == tokens
    torch.testing.assert_close(near, logits, rtol=2e-3, atol=2e-3)
    assert not inspect(path).extra, "all of it is used, also what rotary frequencies are divided by"


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "deepseek2-v3"])
def test_a_pack_of_a_gguf_file_answers_as_the_file_does(name: str, tmp_path: Path) -> None:
    """In the least memory, too; with its tokenizer, and without the file.

    The numbers are the same to the bit.  They lie at other addresses, which may change in which
    order they are added.
    """
    file = random_model(name, tmp_path)
    path = file.write(tmp_path / "model.gguf", bytes_vocabulary(MINI_DENSE))
    tokens, logits, _ = answer(path)
    text, ids = "Where is the harbour?", open_source(path).tokenizer()
    pack = tmp_path / "pack"
    convert(path, pack, EngineConfig.resolve(host_memory="64MiB"))
    path.unlink()
    options = EngineConfig.resolve(host_memory="256MiB", context=128, dtype="float32")
    least = smallest_budget(prepare(pack, options).demand, PlanOptions(0, 128))
    for budget in (256 << 20, least):
        found, same, streamed = answer(pack, host_memory=budget)
        assert found == tokens
        assert (streamed > 0) == (budget == least)
        torch.testing.assert_close(same, logits, rtol=1e-5, atol=1e-5)
    packed = open_source(pack).tokenizer()
    assert packed.encode(text) == ids.encode(text)
    assert packed.eos_ids == ids.eos_ids
    assert not verify(pack, options).damages


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_a_pack_of_a_gguf_file_in_fewer_bits(scheme: str, tmp_path: Path) -> None:
    """What has as few bits already stays as it is, in the pack as in the file."""
    path = random_model("llama", tmp_path).write(tmp_path / "m.gguf", bytes_vocabulary(MINI_DENSE))
    tokens, logits, _ = answer(path, quantization=scheme)
    pack = tmp_path / "pack"
    convert(path, pack, EngineConfig.resolve(host_memory="64MiB", quantization=scheme))
    for asked in ({}, {"quantization": scheme}):
        found, same, _ = answer(pack, **asked)
        assert found == tokens
        torch.testing.assert_close(same, logits, rtol=1e-5, atol=1e-5)


def test_split_files_stream_at_the_smallest_budget(tmp_path: Path) -> None:
    """Whichever file is named, or the folder; and with latent attention's kv_b in two tensors."""
    file = random_model("deepseek2-v3", tmp_path)
    file.split_latent()
    checkpoint = file.write_checkpoint(tmp_path / "checkpoint", MINI_DENSE)
    folder = tmp_path / "split"
    folder.mkdir()
    first = file.write(folder / "model.gguf", bytes_vocabulary(MINI_DENSE), split_max_tensors=20)
    tokens, logits, _ = answer(checkpoint)
    options = EngineConfig.resolve(host_memory="256MiB", context=128, dtype="float32")
    least = smallest_budget(prepare(first, options).demand, PlanOptions(0, 128))
    last = max(folder.iterdir())
    for path, budget in ((first, 256 << 20), (folder, least), (last, least)):
        planned = replace(options, host_memory_bytes=budget, max_batch=1)
        setting = scenario_of(
            planned, machine_for(path), prompt_tokens=None, host_bytes=budget, device_bytes=0
        )
        found_plan = scenarios_for(str(path), planned).plan(setting).plan
        assert found_plan == prepare(path, planned).plan, "hmt plan plans what runs"
        found, near, streamed = answer(path, host_memory=budget)
        assert found == tokens
        assert (streamed > 0) == (budget == least)
        torch.testing.assert_close(near, logits, rtol=2e-3, atol=2e-3)
    first.unlink()
    with pytest.raises(MissingFileError, match="lacks 1 of the"):
        open_checkpoint(last)


def test_text_chats_and_rounding_again(tmp_path: Path) -> None:
    """mini-dense as a file of Q8_0: its tokenizer and template, fewer bits, and no more bits."""
    config = transformers.AutoConfig.from_pretrained(MINI_DENSE)
    file = ModelFile(ARCH.LLAMA, config, lambda tensor: "Q8_0")
    file.add(load_file(MINI_DENSE / "model.safetensors"))
    path = file.write(tmp_path / "mini.gguf", bytes_vocabulary(MINI_DENSE))
    ours, theirs = (open_source(one).tokenizer() for one in (path, MINI_DENSE))
    bits = {(one.published, one.encoding): (one.published_bits, one.bits)
            for one in inspect(path).stored}  # fmt: skip
    assert bits == {("Q8_0", "q8_0"): (8.5, 8.5), ("f32", "f32"): (32, 32)}
    text = "Where is the harbour? I do not know, she said."
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == theirs.eos_ids and ours.vocab_size == theirs.vocab_size
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    assert ours.chat_prompt(chat) == theirs.chat_prompt(chat)
    weights: dict[str, int] = {}
    for scheme in ("none", "w4a8", "w8a16:32"):
        with hmt.Engine(quantization=scheme, context=128) as engine:
            model = engine.load_model(path)
            assert model.infer(hmt.Request(chat, 8)).text == "42", scheme
            layouts = model.prepared.layouts.values()
            weights[scheme] = sum(layout.parameter_bytes for layout in layouts)
    assert weights["w4a8"] < weights["none"] == weights["w8a16:32"]
