"""Packs of today's largest mixtures, with as many of their layers as a disk has room for.

Sizes are those of published models, weights are random.  A pack is made of two models: one with all
layers and experts as narrow as may be, and one of a single layer with some experts of full width.
The second's bytes are copied on disk until every expert of every layer has a separate copy.

Tokens decide where they are routed: embeddings are so large that whatever layers add leaves the
input of a router nearly as it was, and routers are random, with a mean of 0, and differ by layer.
Row t + 1 of the head is the embedding of token t, so greedy decoding goes from token to token, and
tokens are routed to different experts.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hmt.base.units import GIB
from hmt.contracts.blocks import BlockKind
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.models import open_model
from hmt.planner.builtin import builtin_text
from hmt.profiling.random_model import Tensor, write_random_model
from hmt.weights.checksum import checksum
from hmt.weights.pack import MANIFEST, CopiedFile, PackedBlock, encode, read_manifest
from hmt_bench.four_bits import four_bit_noise

_NARROW = 32  # numbers of an expert that is replaced
_WRITTEN = 96  # experts of full width that are written; the others are copies of them
_TABLE, _TABLE_SHARDS = "ngram_embedding.weight", 128  # in which it is published
_CYCLE = 4096  # tokens that follow one another
_EMBEDDED = 1600.0  # times the deviation of other weights


@dataclass(frozen=True, slots=True)
class LargeModel:
    """A published mixture with a number of its layers.

    fields    of its config.json, without what depends on the number of layers
    by_layer  names of fields with an entry for each layer, and the pattern that repeats
    experts   the field that says how many a layer has
    shared    the field that says how wide the shared expert is, in numbers or routed experts
    """

    fields: dict[str, Any]
    by_layer: dict[str, list[str]]
    experts: str
    shared: str
    layers: int
    width: int | None = None
    written: int | None = None

    def config(self, known_tokens: int) -> dict[str, Any]:
        """What config.json says; `known_tokens` does not count."""
        fields, width = dict(self.fields), self.fields["moe_intermediate_size"]
        fields["num_hidden_layers"] = self.layers
        for name, pattern in self.by_layer.items():
            fields[name] = [pattern[layer % len(pattern)] for layer in range(self.layers)]
        if self.written is not None:
            fields[self.experts] = self.written
        if self.width is not None:
            fields["moe_intermediate_size"] = self.width
            if self.shared == "n_shared_experts":  # as wide together as those of full width
                fields[self.shared] *= width // self.width
        return fields

    def tensors(self, config: dict[str, Any]) -> Iterator[Tensor]:
        """Names and shapes as the model declares them; large tables in shards."""
        found: dict[str, tuple[int, ...]] = {}
        for block in open_model(config, Path("config.json"), torch.bfloat16).spec.blocks:
            for param in block.params:
                name, (rows, *rest) = param.sources[0], param.shape
                if param.rows is not None:  # of a head, which is read in parts
                    rows = max(param.rows[1], found.get(name, (0,))[0])
                found[name] = rows, *rest
        for name, (rows, *rest) in found.items():
            if not name.endswith(_TABLE):
                yield name, (rows, *rest)
                continue
            module = name.removesuffix(".weight")
            for shard in range(_TABLE_SHARDS):
                yield f"{module}.shard_{shard}.weight", (rows // _TABLE_SHARDS, *rest)


_FLASH_NEXT = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "output_gate_type": None,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    # Of 20,000,000: 4 of 102 GB, of which a token still finds none in memory.
    "ngram_vocab_size_base": 800_000,
    "make_ngram_vocab_size_divisible_by": 512,
    "seed": 1234,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GLM_FLASH = {
    **json.loads(builtin_text("glm-5.3-flash", "shapes", ".json", "shapes"))["text_config"],
    "architectures": ["Glm5NextForCausalLM"],
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Qwen3.8-Flash-Next: 125 billion parameters in 48 layers, and 51 in a table of n-grams.  And
# GLM-5.3-Flash, 320 billion in 45 layers; here the first three have experts, too.
LARGE_MODELS = {
    "flash-next": LargeModel(
        _FLASH_NEXT,
        {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]},
        "num_experts",
        "shared_expert_intermediate_size",
        48,
    ),
    "glm-flash": LargeModel(
        _GLM_FLASH,
        {
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "indexer_types": ["full"],
            "mlp_layer_types": ["sparse"],
        },
        "n_routed_experts",
        "n_shared_experts",
        45,
    ),
}
# Two of DeepSeek-V3.2's 58 layers with experts, 16 of 256: what a token reads is the same.
# The vocabulary is small.
LAYER_SETS = {
    "v3.2": LargeModel(
        _V32,
        {"mlp_layer_types": ["sparse"]},
        "n_routed_experts",
        "n_shared_experts",
        2,
    )
}


def write_large_pack(
    folder: Path,
    model: LargeModel,
    quantization: str,
    progress: Callable[[str], None] = lambda what: None,
) -> Path:
    """The pack of `model` in `folder`/pack, whose path is returned; made where it is missing.

    On the way the disk holds the checkpoints of narrow experts and of some wide ones besides.
    """
    pack, experts = folder / "pack", folder / "experts"
    if (folder / "done").exists():
        return pack
    for place in (pack, experts, folder / "checkpoint"):
        shutil.rmtree(place, ignore_errors=True)
    config = EngineConfig.resolve(quantization=quantization)
    written = min(_WRITTEN, model.fields[model.experts])
    wide = replace(model, layers=len(next(iter(model.by_layer.values()))), written=written)
    narrow = replace(model, width=_NARROW)
    for checkpoint, shape, there in (
        (folder / "checkpoint", narrow, pack),
        (experts / "checkpoint", _alone(wide), experts / "pack"),
    ):
        progress("writing random weights")
        write_random_model(
            checkpoint, shape, noise=four_bit_noise, shard_bytes=GIB, edit=_Following()
        )
        progress("converting")
        convert(checkpoint, there, config)
        shutil.rmtree(checkpoint)
    progress("copying experts")
    _take_experts(pack, experts / "pack", model)
    shutil.rmtree(experts)
    (folder / "done").touch()
    return pack


def _alone(model: LargeModel) -> LargeModel:
    """One layer of `model` and a small vocabulary: only its experts are used."""
    small = {"vocab_size": 64, "ple_layer_ids": [], "num_experts_per_tok": 1}
    return replace(model, layers=1, fields={**model.fields, **small})


class _Following:
    """Changes embeddings and heads so that token t + 1 follows token t."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def __call__(self, name: str, matrix: torch.Tensor) -> None:
        count = min(_CYCLE, len(matrix) - 1)
        if name == "model.embed_tokens.weight":
            self._rows = matrix[:count].clone()
            matrix *= _EMBEDDED
        elif name == "lm_head.weight":
            matrix.zero_()
            matrix[1 : count + 1] = self._rows


def _take_experts(pack: Path, other: Path, model: LargeModel) -> None:
    """Let the experts of `pack` be those of `other`'s only layer, each in a separate copy."""
    manifest, source = read_manifest(pack), read_manifest(other)
    given = [block for block in source.blocks if block.id.kind is BlockKind.EXPERT]
    files, taken = dict(manifest.files), {}
    copies = range(-(-model.fields[model.experts] // len(given)))
    for layer in range(model.layers):
        for copy in copies:
            taken[layer, copy] = len(files)
            for name, nbytes in source.files.items():
                own = f"experts-{layer:02}-{copy:02}-{name}"
                shutil.copyfile(other / name, pack / own)
                files[own] = nbytes

    def wide(block: PackedBlock) -> PackedBlock:
        if block.id.kind is not BlockKind.EXPERT:
            return block
        copy, place = divmod(block.id.index, len(given))
        instead = given[place]
        assert instead.extent is not None
        file = taken[block.id.layer, copy] + instead.extent.file
        return replace(instead, id=block.id, extent=replace(instead.extent, file=file))

    config = json.loads((pack / "config.json").read_text()) | model.config(0)
    text = json.dumps(config, indent=1).encode()
    (pack / "config.json").write_bytes(text)
    small = dict(manifest.copies)
    if "config.json" in small:
        small["config.json"] = CopiedFile(len(text), checksum(text))
    blocks = tuple(map(wide, manifest.blocks))
    large = replace(manifest, files=files, copies=small, blocks=blocks)
    (pack / MANIFEST).write_bytes(encode(large))
