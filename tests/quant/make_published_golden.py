"""Writes published.safetensors: weights as reference packages publish and dequantise them.

For test_published.py, which runs without those packages.  Made with compressed-tensors 0.20.0,
bitsandbytes 0.50.2 (on a CPU) and transformers 5.23.0, by

    pip install --no-deps compressed-tensors==0.20.0 loguru bitsandbytes==0.50.2
    python tests/quant/make_published_golden.py

Tensors are called CASE/PART as HMT's forms call parts, and CASE/wanted for what the package makes
of them, in f32, of scales that are brought to f32 first: packages compute in the scales' dtype.
"""

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, COLUMNS = 20, 96
Parts = dict[str, torch.Tensor]


def weight(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=random) * 0.05


def scales_of(values: torch.Tensor, args: QuantizationArgs) -> Parts:
    """Scales, and zero points, such as a round-to-nearest observer finds."""
    sizes = {"tensor": (1, 1), "channel": (ROWS, 1), "group": (ROWS, COLUMNS // 32)}
    if args.strategy == "block":
        high, wide = args.block_structure
        scale = torch.stack(
            [
                torch.stack([part.abs().max() for part in band.split(wide, 1)])
                for band in values.split(high, 0)
            ]
        )
        return {"weight_scale": (scale / 448).bfloat16()}
    rows, groups = sizes[args.strategy]
    parts = values.reshape(rows, groups, -1)
    low, high = parts.amin(-1), parts.amax(-1)
    largest = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    if args.symmetric:
        scale = (torch.maximum(high, -low) / largest).bfloat16()
        return {"weight_scale": scale.view(-1) if rows == 1 else scale}
    scale = ((high.clamp_min(0) - low.clamp_max(0)) / (2**args.num_bits - 1)).bfloat16()
    zero = (-(2 ** (args.num_bits - 1)) - low.clamp_max(0) / scale.float()).round()
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def compressed(form: str, **fields: Any) -> Parts:
    """One of compressed-tensors' own compressors, and what it makes of what it published."""
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    values = weight(len(form) + sum(map(len, map(str, fields.values()))))
    state = {"weight": values, **scales_of(values, args)}
    published = compressor.compress(state, scheme)
    exact = {
        name: part.float() if name == "weight_scale" else part for name, part in published.items()
    }
    wanted = compressor.decompress(exact, scheme)["weight"]
    assert wanted.dtype is torch.float32
    assert (wanted - values).norm() < 0.4 * values.norm()
    return published | {"wanted": wanted}


def nvfp4() -> Parts:
    values = weight(1)
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    factor = 448 * 6 / values.abs().max().reshape(1)
    peaks = values.view(ROWS, -1, 16).abs().amax(-1) / 6
    state = {
        "weight": values,
        "weight_scale": (peaks * factor).to(torch.float8_e4m3fn).float(),
        "weight_global_scale": factor,
    }
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    published = compressor.compress(state, scheme)
    wanted = compressor.decompress(dict(published), scheme)["weight"]
    return {
        "codes": published["weight_packed"],
        "scales": published["weight_scale"],
        "factor": published["weight_global_scale"],
        "wanted": wanted,  # in bf16
    }


def mxfp4() -> Parts:
    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 32, 16), generator=random)
    scales = torch.randint(117, 131, (1, ROWS, COLUMNS // 32), generator=random)
    blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"codes": blocks, "scales": scales, "wanted": wanted[0].T.contiguous()}


def table(quant_type: str, nested: bool, dtype: torch.dtype) -> Parts:
    values = weight(3).to(dtype)
    codes, state = bnb.quantize_4bit(
        values, blocksize=64, quant_type=quant_type, compress_statistics=nested
    )
    scales = state.absmax
    if nested:
        scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    # What the package's CPU kernel makes of blocks that end within a row is not what the package
    # itself wrote (0.50.2); its own plain torch and its GPU kernels do as is written here.
    plain = _dequantize_4bit_compute.__wrapped__
    wanted = plain(codes.flatten(), scales, state.code, 64, values.shape, dtype)
    assert (wanted - values).norm() < 0.2 * values.norm()
    parts = {"weight": codes, "quant_map": state.code, "absmax": state.absmax, "wanted": wanted}
    if nested:
        parts |= {
            "nested_absmax": state.state2.absmax,
            "nested_quant_map": state.state2.code,
            "nested_offset": state.offset.reshape(1),
        }
    return parts


def int8_rows() -> Parts:
    codes, scales, _ = bnb.int8_vectorwise_quant(weight(4).half())
    wanted = bnb.int8_vectorwise_dequant(codes, scales)
    return {"weight": codes, "SCB": scales, "wanted": wanted}


def main() -> None:
    warnings.simplefilter("ignore")
    group = {"strategy": "group", "group_size": 32}
    cases = {
        "pack-4-group": compressed("pack-quantized", num_bits=4, symmetric=True, **group),
        "pack-4-channel": compressed("pack-quantized", num_bits=4, strategy="channel"),
        "pack-4-zeros": compressed("pack-quantized", num_bits=4, symmetric=False, **group),
        "pack-3-group": compressed("pack-quantized", num_bits=3, symmetric=True, **group),
        "pack-8-group": compressed("pack-quantized", num_bits=8, symmetric=True, **group),
        "pack-8-zeros": compressed(
            "pack-quantized", num_bits=8, symmetric=False, strategy="channel"
        ),
        "int-channel": compressed("int-quantized", num_bits=8, strategy="channel"),
        "int-tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
        "float-tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "float-channel": compressed(
            "float-quantized", num_bits=8, type="float", strategy="channel"
        ),
        "float-block": compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 64]
        ),
        "nvfp4": nvfp4(),
        "mxfp4": mxfp4(),
        "nf4": table("nf4", False, torch.float32),
        "nf4-nested": table("nf4", True, torch.bfloat16),
        "fp4": table("fp4", False, torch.float16),
        "bnb-int8": int8_rows(),
    }
    tensors = {
        f"{case}/{name}": part.contiguous()
        for case, parts in cases.items()
        for name, part in parts.items()
    }
    save_file(tensors, Path(__file__).with_name("published.safetensors"))


if __name__ == "__main__":
    main()
