"""A small llama in every format that others publish, through the engine, against transformers.

Every file is read block by block in the least memory that works.
"""

import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import after_first
from publishers import PUBLISHERS, mxfp4
from rank_threads import ranks_as_threads
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import hmt
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import Activations, Encoding
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.inspection import inspect
from hmt.engine.loading.packs import convert
from hmt.engine.loading.prepared import Prepared
from hmt.formats import open_checkpoint
from hmt.planner import PlanOptions, smallest_budget

OPTIONS = {
    "dtype": "float32",
    "context": 32,
    "max_prefill_tokens": 16,
    "max_batch": 1,
    "activations": "exact",
}
VOCAB = 300
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(1 if "norm" in name else torch.randn(tensor.shape) * 0.15)
    return model


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    (folder / "config.json").write_text(json.dumps(config, default=str))
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata=metadata)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)


def publish(name: str, llama: LlamaForCausalLM, folder: Path) -> dict[str, torch.Tensor]:
    """Write what `name` makes of the layers' matrices; all parameters as numbers."""
    publisher = PUBLISHERS[name]
    torch.manual_seed(6)
    tensors, plain = {}, {}
    metadata = {}
    for key, tensor in llama.state_dict().items():
        if key.startswith("model.layers") and tensor.dim() == 2:
            parts, plain[key] = publisher.publish(tensor)
            assert (plain[key] - tensor).norm() < 0.2 * tensor.norm()
            module = key.removesuffix(".weight")
            tensors |= {f"{module}.{end}": part for end, part in parts.items()}
            if publisher.about is not None:
                metadata[key] = json.dumps(publisher.about)
        else:
            tensors[key] = plain[key] = tensor
    section = {"quantization_config": publisher.config, "architectures": ["LlamaForCausalLM"]}
    write(folder, CONFIG.to_dict() | section, tensors, metadata or None)
    return plain


# Static groups differ in their configuration alone.
@pytest.mark.parametrize("name", sorted(PUBLISHERS.keys() - {"gptq-static"}))
def test_logits_equal_those_of_the_numbers_that_are_published(
    name: str, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    plain = publish(name, llama, tmp_path)
    check_sizes(tmp_path)
    reference = LlamaForCausalLM(CONFIG).eval()
    reference.load_state_dict(plain)
    check(tmp_path, reference, packed=name in ("awq", "fp8", "hqq", "modelopt-nvfp4", "quanto"))


@pytest.mark.parametrize(
    "name",
    ["awq", "gptq", *after_first(sorted(PUBLISHERS.keys() - {"awq", "gptq", "gptq-static"}), 0)],
)
def test_two_ranks_have_the_numbers_of_one(
    name: str, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Rows and columns of each form, cut where its groups end; or said where they cannot be."""
    publish(name, llama, tmp_path)
    tokens = [random.Random(4).randrange(VOCAB) for _ in range(20)]
    found = []
    for ranks in ({}, {"tp": 2}):
        with ranks_as_threads(), hmt.Engine(host_memory="64MiB", **OPTIONS, **ranks) as engine:
            model = engine.load_model(tmp_path)
            found.append(model.logits(tokens, range(20), prefill=16))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5 * float(found[0].abs().max()))


def test_embedding_and_head_of_torchao(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """A byte for each code, in two files, of which one has the metadata of both."""
    plain, shards = dict(llama.state_dict()), ({}, {})
    metadata = {}
    for number, (key, bits) in enumerate(
        {
            "model.embed_tokens.weight": 8,
            "lm_head.weight": 4,
            "model.layers.1.mlp.up_proj.weight": 8,
        }.items()
    ):
        tensor, high = plain.pop(key), (1 << bits - 1) - 1
        groups = tensor.view(len(tensor), -1, 32)
        scales = (groups.abs().amax(-1) / high).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-high - 1, high)
        plain[key] = (codes * scales.float()[..., None]).view(tensor.shape)
        start = key.removesuffix("weight") + "_weight_"
        shards[number % 2][f"{start}qdata"] = codes.to(torch.int8).view(tensor.shape)
        shards[number % 2][f"{start}scale"] = scales
        shards[number % 2][f"{start}zero_point"] = torch.zeros_like(scales, dtype=torch.int8)
        fields = {"block_size": [1, 32], "target_dtype": {"_data": f"int{bits}"}}
        metadata[key] = json.dumps({"_type": "IntxUnpackedToInt8Tensor", "_data": fields})
    others = {key: part for key, part in plain.items() if key not in metadata}
    section = {"quantization_config": {"quant_method": "torchao"}}
    config = CONFIG.to_dict() | section | {"architectures": ["LlamaForCausalLM"]}
    write(tmp_path, config, shards[0] | others, metadata)
    save_file(shards[1], tmp_path / "other.safetensors")
    reference = LlamaForCausalLM(CONFIG).eval()
    reference.load_state_dict(plain)
    check(tmp_path, reference)


def check_sizes(folder: Path) -> None:
    """`hmt inspect` accounts for every byte of the file, and names a kernel for every matrix."""
    found, checkpoint = inspect(folder), open_checkpoint(folder)
    records = checkpoint.records
    spare = sum(records[name].nbytes for name in checkpoint.spare & records.keys())
    used = sum(one.published_bytes for one in found.stored)
    assert 0 <= found.published_bytes - used <= spare
    assert not found.problem and not found.extra
    assert all(one.published for one in found.stored)
    assert all(bool(one.kernel) == (one.kind != "embedding") for one in found.stored)


def prepared(folder: Path) -> Prepared:
    return prepare(folder, EngineConfig.resolve(host_memory="64MiB", **OPTIONS))


def check(folder: Path, reference: PreTrainedModel, *, packed: bool = False) -> None:
    """The engine's logits in the least memory against those of `reference`, to the bit in a pack.

    packed   a pack of it, too, is run
    """
    rng = random.Random(7)
    tokens = [rng.randrange(VOCAB) for _ in range(20)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    least = smallest_budget(prepared(folder).demand, PlanOptions(0, 32, 16))
    found = logits(folder, tokens, least)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    if packed:
        convert(folder, folder / "pack", EngineConfig.resolve())
        assert torch.equal(logits(folder / "pack", tokens, 64 << 20), found)


def logits(folder: Path, tokens: list[int], budget: int) -> torch.Tensor:
    with hmt.Engine(host_memory=budget, **OPTIONS) as engine:
        return engine.load_model(folder).logits(tokens, range(len(tokens)), prefill=16)


def test_gpt_oss_as_openai_publishes_it(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        max_position_embeddings=256,
        pad_token_id=None,
    )
    torch.manual_seed(8)
    reference = GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    tensors = {}
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            tensor.copy_((torch.randn(tensor.shape) * 0.15 + ("norm" in name)).bfloat16())
            if not name.endswith(("gate_up_proj", "down_proj")):
                tensors[name] = tensor.bfloat16()
                continue
            codes, exponents, wanted = mxfp4(tensor.mT.flatten(0, 1))
            tensors[f"{name}_blocks"] = codes.view(*tensor.mT.shape[:2], -1, 16)
            tensors[f"{name}_scales"] = exponents.view(*tensor.mT.shape[:2], -1)
            tensor.copy_(wanted.view(tensor.mT.shape).mT)
    section = {"quantization_config": {"quant_method": "mxfp4"}}
    write(tmp_path, config.to_dict() | {"architectures": ["GptOssForCausalLM"]} | section, tensors)
    check(tmp_path, reference, packed=True)
    experts = [layout for at, layout in prepared(tmp_path).layouts.items() if at.layer == 1][2:]
    assert len(experts) == 4
    for layout in experts:
        encodings = [placed.format.encoding for placed in layout.placed]
        assert encodings.count(Encoding.MXFP4) == encodings.count(Encoding.BF16) == 3
        # Gate and up projection share their bytes, which are read once.
        read = sum(read.useful_bytes or 0 for stage in layout.staged for read in stage.reads)
        parts = {part.file for placed in layout.placed for part in placed.param.parts}
        assert read == sum(part.nbytes for part in parts)


def test_few_bits_are_not_rounded_to_as_many_again(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """FP8 takes no int8 activations, so it is rounded to int8 where those are asked for."""
    found = {}
    for name in ("awq", "nvfp4", "fp8-blocks"):
        (tmp_path / name).mkdir()
        publish(name, llama, tmp_path / name)
        for scheme in ("w4a8", "w8a8"):
            config = EngineConfig.resolve(host_memory="64MiB", quantization=scheme, **OPTIONS)
            layout = prepare(tmp_path / name, config).layouts[BlockId(1, BlockKind.FFN)]
            forms = {placed.format for placed in layout.placed if placed.param.spec.shape[1:]}
            [found[name, scheme]] = {(form.encoding, form.activations) for form in forms}
    codes, four, eight = Activations.INT8_TOKEN, Encoding.INT4_GROUP, Encoding.INT8_CHANNEL
    assert found == {
        ("awq", "w4a8"): (four, Activations.INT8_GROUP),
        ("awq", "w8a8"): (four, Activations.INT8_GROUP),
        ("nvfp4", "w4a8"): (Encoding.NVFP4, codes),
        ("nvfp4", "w8a8"): (Encoding.NVFP4, codes),
        ("fp8-blocks", "w4a8"): (four, codes),
        ("fp8-blocks", "w8a8"): (eight, codes),
    }


def test_deepseek_as_nvidia_publishes_it(tmp_path: Path) -> None:
    """Experts and dense layers in NVFP4, attention excluded, and an index without the scales."""
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    torch.manual_seed(9)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = DeepseekV3ForCausalLM._from_config(config, **options).eval()
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.15 + ("norm" in name))
    reference.save_pretrained(tmp_path / "plain")
    publish = PUBLISHERS["modelopt-nvfp4"].publish
    tensors, plain = {}, {}
    for key, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        if ".mlp." not in key or ".gate." in key:
            tensors[key] = plain[key] = tensor
            continue
        parts, plain[key] = publish(tensor)
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{end}": part for end, part in parts.items()}
    write(tmp_path, config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}, tensors)
    excluded = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*self_attn*"]}
    theirs = {"producer": {"name": "modelopt"}, "quantization": excluded}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(theirs))
    index = {key: "model.safetensors" for key in tensors if "scale" not in key}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path, DeepseekV3ForCausalLM.from_pretrained(tmp_path / "plain", **options).eval())
