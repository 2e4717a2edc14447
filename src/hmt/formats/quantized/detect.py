"""Which quantisation a checkpoint has, and the code that knows it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hmt.base.errors import CheckpointError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.quantized.auto_round import find_auto_round
from hmt.formats.quantized.awq import find_awq
from hmt.formats.quantized.bitsandbytes import find_bitsandbytes
from hmt.formats.quantized.compressed_tensors import find_compressed
from hmt.formats.quantized.convolutions import find_convolutions
from hmt.formats.quantized.expert_tables import find_expert_tables
from hmt.formats.quantized.fp8 import find_fp8
from hmt.formats.quantized.gpt_oss import find_gpt_oss
from hmt.formats.quantized.gptq import find_gptq
from hmt.formats.quantized.hqq import find_hqq
from hmt.formats.quantized.modelopt import find_modelopt
from hmt.formats.quantized.quanto import find_quanto, is_quanto
from hmt.formats.quantized.scan import Quantized
from hmt.formats.quantized.shards import find_shards
from hmt.formats.quantized.stacked_experts import find_stacked_experts
from hmt.formats.quantized.torchao import find_torchao

_METHODS: dict[str, Callable[[Quantized], None]] = {
    "auto-round": find_auto_round,
    "awq": find_awq,
    "bitsandbytes": find_bitsandbytes,
    "compressed-tensors": find_compressed,
    "fbgemm_fp8": find_fp8,
    "fp8": find_fp8,
    "gptq": find_gptq,
    "hqq": find_hqq,
    "modelopt": find_modelopt,
    "modelopt_fp4": find_modelopt,
    "mxfp4": find_gpt_oss,
    "mxfp8": find_fp8,
    "quanto": find_quanto,
    "torchao": find_torchao,
}
# Models whose experts are published in one tensor for each layer.
_STACKED = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)


def find_forms(
    folder: Path,
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None,
    records: Mapping[str, TensorRecord],
) -> Quantized:
    """What is quantised in a checkpoint: nothing where its configuration says nothing.

    hf_quant_config   the parsed file of that name, if there is one
    Raises CheckpointError for a method or an option that HMT does not read, MissingFileError and
    ShapeError for tensors that contradict the configuration.
    """
    section = quantization_section(config, hf_quant_config)
    if not section and is_quanto(records):
        section = {"quant_method": "quanto"}
    method = str(section.get("quant_method", "")).lower()
    if method == "intel/auto-round":  # before it was called so alone
        method = "auto-round"
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not section:
        found = Quantized(folder, section, "floats", records)
        if architecture == "GptOssForCausalLM":
            find_gpt_oss(found)
        elif architecture in _STACKED:
            find_stacked_experts(found)
        find_convolutions(found)
        find_shards(found)
        find_expert_tables(found)
        return found
    if method not in _METHODS:
        raise CheckpointError(
            f"{folder} is quantised with {section.get('quant_method')!r}, which is not supported; "
            f"HMT reads {', '.join(sorted(_METHODS))}, and unquantised BF16, FP16 and FP32: take "
            "another version of this model"
        )
    found = Quantized(folder, section, method, records)
    _METHODS[method](found)
    find_convolutions(found)
    find_shards(found)
    find_expert_tables(found)
    return found


def quantization_section(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """What a checkpoint says about its quantisation, with `quant_method`; empty without any.

    Multimodal configurations keep it in `text_config`; ModelOpt writes a file of its own, and
    newer versions `quant_method` "modelopt" in config.json, too.
    """
    text_config = config.get("text_config")
    inner = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    section = config.get("quantization_config") or inner
    if isinstance(section, dict) and section:
        return section
    if section:
        return {"quant_method": f"{section!r}, which is no object"}
    theirs = (hf_quant_config or {}).get("quantization")
    return {"quant_method": "modelopt", **theirs} if isinstance(theirs, dict) else {}
