"""Quantised weights as compressed-tensors publishes them (vllm-project/compressed-tensors).

Integers are `pack-quantized`, 4-bit floats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hmt.quant.methods.interface import QuantizedWeight, Target

Sizes = dict[str, tuple[str, tuple[int, ...]]]  # (dtype as in safetensors, shape) by suffix

_FORMATS = {
    "int": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}
_CHUNK_NUMBERS = 1 << 20  # that are packed at once: three copies in int64 are 24 MiB


def sizes(target: Target, shape: tuple[int, int], scale_dtype: str) -> Sizes:
    """What is published of a weight [outputs, inputs], by the suffix of its module's name.

    scale_dtype   of scales of integers: "F32", "F16" or "BF16"
    """
    rows, columns = shape
    groups = columns // (target.group_size or columns)
    if target.kind != "int":
        scales = "F8_E4M3" if target.kind == "nvfp4" else "U8"
        parts: Sizes = {
            "weight_packed": ("U8", (rows, columns // 2)),
            "weight_scale": (scales, (rows, groups)),
        }
        if target.kind == "nvfp4":
            parts["weight_global_scale"] = ("F32", (1,))
        return parts
    parts = {
        "weight_packed": ("I32", (rows, -(-columns * target.bits // 32))),
        "weight_scale": (scale_dtype, (rows, groups)),
        "weight_shape": ("I64", (2,)),
    }
    if not target.symmetric:
        parts["weight_zero_point"] = ("I32", (-(-rows * target.bits // 32), groups))
    return parts


def encoded(weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that `sizes` lists."""
    codes, target = weight.codes, weight.target
    if target.kind != "int":
        parts = {
            "weight_packed": _pairs(codes),
            "weight_scale": weight.scales,
        }
        if weight.global_scale is not None:
            # Published is what scales were multiplied with, not what they are multiplied with.
            parts["weight_global_scale"] = weight.global_scale.float().reshape(1).reciprocal()
        return parts
    parts = {
        "weight_packed": pack_bits(codes, target.bits),
        "weight_scale": weight.scales.to(scale_dtype),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if weight.zero_points is not None:
        # Along the rows.
        parts["weight_zero_point"] = pack_bits(weight.zero_points.T, target.bits).T.contiguous()
    return parts


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Signed codes int8 [rows, n] as words int32 [rows, ceil(n * bits / 32)].

    code + 2^(bits - 1) takes the `bits` bits from bit i * bits of its row on, the lowest bits of
    the first word first.
    """
    rows, count = codes.shape
    words = -(-count * bits // 32)
    out = torch.empty(rows, words, dtype=torch.int32, device=codes.device)
    step = max(1, _CHUNK_NUMBERS // count)
    for start in range(0, rows, step):
        out[start : start + step] = _packed(codes[start : start + step], bits)[:, :words]
    return out


def _packed(codes: Tensor, bits: int) -> Tensor:
    numbers = codes.to(torch.int64) + (1 << bits - 1)
    numbers = torch.nn.functional.pad(numbers, (0, -codes.shape[1] % 32))
    runs = numbers.view(len(codes), -1, 32)  # of 32 numbers, which fill `bits` words
    words = torch.zeros(*runs.shape[:2], bits + 1, dtype=torch.int64, device=codes.device)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        wide = runs[..., place] << shift
        words[..., word] |= wide & 0xFFFFFFFF
        words[..., word + 1] |= wide >> 32
    words = words[..., :bits].flatten(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _pairs(codes: Tensor) -> Tensor:
    """4-bit codes [rows, n], two in a byte, the first in the low nibble: uint8 [rows, n / 2]."""
    numbers = codes.view(torch.uint8) & 15
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def quantization_config(modules: Mapping[str, Target], ignored: Iterable[str]) -> dict[str, Any]:
    """`quantization_config` of config.json for modules that are quantised so, and those not.

    The usual form is said of all linear layers, others of modules by their names.
    """
    by_target: dict[Target, list[str]] = {}
    for module, target in modules.items():
        by_target.setdefault(target, []).append(module)
    ordered = sorted(by_target.items(), key=lambda item: (-len(item[1]), repr(item[0])))
    groups = {}
    for number, (target, members) in enumerate(ordered):
        groups[f"group_{number}"] = {
            "targets": sorted(members) if number else ["Linear"],
            "weights": _arguments(target),
            "input_activations": None,
            "output_activations": None,
            "format": _FORMATS[target.kind],
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(target: Target) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_bits": target.bits,
        "symmetric": target.symmetric,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    match target.kind:
        case "int" if target.group_size:
            form = {"type": "int", "strategy": "group", "group_size": target.group_size}
        case "int":
            form = {"type": "int", "strategy": "channel", "group_size": None}
        case "nvfp4":
            form = {"type": "float", "strategy": "tensor_group", "group_size": 16}
            form["scale_dtype"] = "torch.float8_e4m3fn"
        case _:
            form = {"type": "float", "strategy": "group", "group_size": 32}
            form["scale_dtype"] = "torch.uint8"
    return arguments | form
