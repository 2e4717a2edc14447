"""The reference models, and the same weights in transformers as the oracle."""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers

from hmt.formats import open_checkpoint

MINI_DENSE = Path(str(files("hmt") / "embedded" / "mini-dense"))
MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"
MODELS = {"mini-dense": MINI_DENSE, "mini-moe": MINI_MOE}

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def published_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in f32, FP8 blocks multiplied with their scales; independent of HMT's kernels."""
    checkpoint = open_checkpoint(folder)
    raw = {}
    for name, record in checkpoint.records.items():
        with record.file.open("rb") as file:
            file.seek(record.offset)
            data = bytearray(file.read(record.nbytes))
        raw[name] = torch.frombuffer(data, dtype=_DTYPES[record.dtype]).view(record.shape).float()
    tensors = {}
    for name, weight in raw.items():
        if name.endswith("_scale_inv"):
            continue
        scales = raw.get(name + "_scale_inv")
        if scales is not None:
            full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight = weight * full[: weight.shape[0], : weight.shape[1]]
        tensors[name] = weight
    return tensors


@cache
def transformers_model(name: str) -> Any:
    """The reference model `name` in transformers, f32, weights dequantised where need be."""
    folder = MODELS[name]
    config = transformers.AutoConfig.from_pretrained(folder)
    config.dtype = "float32"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = published_tensors(folder)
    state = model.state_dict()
    for key in state:
        if key in tensors:
            state[key].copy_(tensors[key])
        elif key.endswith("experts.gate_up_proj") or key.endswith("experts.down_proj"):
            prefix, _, part = key.rpartition(".")
            for expert in range(len(state[key])):
                own = f"{prefix}.{expert}"
                if part == "down_proj":
                    value = tensors[f"{own}.down_proj.weight"]
                else:
                    halves = [tensors[f"{own}.{half}_proj.weight"] for half in ("gate", "up")]
                    value = torch.cat(halves)
                state[key][expert].copy_(value)
        else:
            assert key == "lm_head.weight" and config.tie_word_embeddings, key
    return model.eval()
