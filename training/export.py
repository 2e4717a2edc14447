"""Write a trained model as a Hugging Face checkpoint, the MoE in DeepSeek's FP8 format."""

import json
import re
from pathlib import Path

import torch
from architectures import CONTEXT, MultiTokenPrediction
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TILE = 128
_FP8 = torch.float8_e4m3fn
# DeepSeek keeps these in BF16: norms and routers are small and sensitive, and embedding, head and
# eh_proj are as published.
# So is the tower of a model that sees.
_KEPT = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.|\.router\.|eh_proj|visual")
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [TILE, TILE],
}
_CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def export(
    out: Path, model: PreTrainedModel, tokenizer: Tokenizer, mtp: MultiTokenPrediction | None
) -> None:
    """Write weights, configurations and tokenizer into folder `out`.

    Without `mtp` in BF16; with it in FP8 tiles, the MTP module as the layer after the last.
    """
    out.mkdir(parents=True, exist_ok=True)
    if mtp is None:
        model.save_pretrained(out)
    else:
        _save_moe(out, model, mtp)
    save_tokenizer(out, tokenizer)


def save_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and its chat template into folder `out`."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=CONTEXT,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(out)


def quantize_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] as FP8 e4m3 and one f32 factor per 128 x 128 tile.

    Number times factor is the weight; the largest number of each tile becomes 448, the largest
    finite e4m3.  A tile of zeros gets the factor 1.
    """
    rows, columns = weight.shape
    down, across = -(-rows // TILE), -(-columns // TILE)
    padded = weight.new_zeros(down * TILE, across * TILE, dtype=torch.float32)
    padded[:rows, :columns] = weight
    tiles = padded.view(down, TILE, across, TILE)
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / torch.finfo(_FP8).max, 1.0)
    numbers = (tiles / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return numbers.to(_FP8), scales


def dequantize(
    tensor: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """FP8 numbers [out, in] times their tiles' factors, in `dtype`; other tensors as they are."""
    if scales is None:
        return tensor
    rows, columns = tensor.shape
    factors = scales.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return (tensor.float() * factors).to(dtype)


def quantize_checkpoint(folder: Path, kept: tuple[str, ...] = ()) -> None:
    """Bring the matrices of a checkpoint of one file to FP8 tiles, in place.

    kept   modules that stay as they are, for the configuration to name
    """
    encoded = _encode(load_file(folder / "model.safetensors"))
    save_file(encoded, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    named = {"modules_to_not_convert": list(kept)} if kept else {}
    _write_json(folder / "config.json", config | {"quantization_config": _QUANTIZATION | named})


def published(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """transformers' state under the names of DeepSeek's checkpoints: each expert by itself."""
    tensors = {}
    for name, value in state.items():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                tensors[f"{prefix}{stem}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}{stem}.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            for expert, own in enumerate(value):
                tensors[f"{prefix}{stem}.{expert}.down_proj.weight"] = own
        else:
            tensors[prefix + name] = value
    return tensors


def _save_moe(out: Path, model: PreTrainedModel, mtp: MultiTokenPrediction) -> None:
    extra = f"model.layers.{model.config.num_hidden_layers}."
    own = {name.removeprefix("layer."): value for name, value in mtp.state_dict().items()}
    own["shared_head.norm.weight"] = own.pop("norm.weight")
    shards = [published(model.state_dict()), published(own, extra)]
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        encoded = _encode(tensors)
        save_file(encoded, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(encoded, file)
        total += sum(tensor.nbytes for tensor in encoded.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)

    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    config["quantization_config"] = _QUANTIZATION
    _write_json(out / "config.json", config)


def _encode(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    encoded = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if _KEPT.search(name):
            encoded[name] = tensor.contiguous()
        else:
            numbers, scales = quantize_tiles(tensor)
            encoded[name] = numbers.contiguous()
            encoded[f"{name}_scale_inv"] = scales
    return encoded


def _write_json(file: Path, data: object) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n")
