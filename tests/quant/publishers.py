"""Writes weights as other people's packages publish them, number by number, for tests.

A publisher takes a weight [out, in], rounds it in the simplest way, and returns its tensors by the
end of their names, and in f32 what they stand for.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4_LIKE = torch.linspace(-1, 1, 16) ** 3  # a table is published with the weights
E4M3, I32 = torch.float8_e4m3fn, torch.int32
GROUP = 32


@dataclass(frozen=True)
class Publisher:
    """config: config.json's quantization_config; about: a weight's metadata in its file."""

    config: dict[str, Any]
    publish: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
    about: dict[str, Any] | None = None


def words(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Rows of numbers, each packed from its lowest bit on, as int32 [rows, words]."""
    packed = [sum(code << bits * at for at, code in enumerate(row)) for row in rows]
    size = -(-len(rows[0]) * bits // 32) * 4
    raw = b"".join(row.to_bytes(size, "little") for row in packed)
    return torch.frombuffer(bytearray(raw), dtype=I32).view(len(rows), -1).clone()


def awq_words(values: torch.Tensor) -> torch.Tensor:
    """Codes [out, n] as AutoAWQ packs them: nibble n of eight outputs holds output ORDER[n]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = values.T.reshape(-1, len(values) // 8, 8)[..., order].flatten(1)
    return words(shuffled.tolist(), 4)


def grouped(
    w: torch.Tensor, bits: int, dtype: torch.dtype, *, symmetric: bool, size: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in] from 0 on, scales and zero points [out, groups]."""
    groups, largest = w.view(len(w), -1, size), (1 << bits) - 1
    if symmetric:
        scales = (2 * groups.abs().amax(-1) / largest).to(dtype)
        zeros = torch.full_like(scales, 1 << bits - 1).long()
    else:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scales = ((high - low) / largest).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, largest).long()
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, largest).long().flatten(1), scales, zeros


def numbers(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    spread = codes.shape[1] // scales.shape[1]
    signed = (codes - zeros.repeat_interleave(spread, 1)).float()
    return signed * scales.float().repeat_interleave(spread, 1)


def awq(size: int = GROUP) -> Publisher:
    """Groups of `size`."""

    def publish(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales, zeros = grouped(w, 4, torch.float16, symmetric=False, size=size)
        parts = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales.T}
        return parts, numbers(codes, scales, zeros)

    return Publisher({"quant_method": "awq", "bits": 4, "group_size": size}, publish)


def gptq(
    bits: int,
    *,
    symmetric: bool,
    ordered: bool = False,
    less: int = 1,
    static: bool = False,
    size: int = GROUP,
) -> Publisher:
    """Groups of `size`; `less`: what is stored for a zero point is so much less."""

    def publish(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = w.shape[1]
        order = torch.randperm(columns) if ordered else torch.arange(columns)
        codes, scales, zeros = grouped(
            w[:, order], bits, torch.float16, symmetric=symmetric, size=size
        )
        back = order.argsort()
        parts = {
            "qweight": words(codes[:, back].tolist(), bits).T,
            "qzeros": words(((zeros - less) % (1 << bits)).T.tolist(), bits),
            "scales": scales.T,
            "g_idx": (torch.arange(columns) // size)[back].to(I32),
        }
        found = numbers(codes, scales, zeros)[:, back]
        return parts, found.half().float() if ordered else found

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": symmetric,
        "desc_act": ordered or static,
        "static_groups": static,
        "checkpoint_format": "gptq" if less else "gptq_v2",
    }
    return Publisher(config, publish)


def _compressed(form: str, weights: dict[str, Any], publish: Callable[..., Any]) -> Publisher:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    groups = {"other": {"targets": ["re:.*nothing"], "weights": {}}, "group_0": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    return Publisher(config, publish)


def packed_integers(size: int = GROUP) -> Publisher:
    """compressed-tensors, 4 bits with zero points."""

    def publish(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales, zeros = grouped(w, 4, torch.bfloat16, symmetric=False, size=size)
        parts = {
            "weight_packed": words(codes.tolist(), 4),
            "weight_scale": scales,
            "weight_zero_point": words(zeros.T.tolist(), 4).T,
            "weight_shape": torch.tensor(w.shape),
        }
        return parts, numbers(codes, scales, zeros)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    return _compressed("pack-quantized", weights | {"symmetric": False}, publish)


def _int8(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scales = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (w / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def _e4m3(w: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales f32 of whole tiles."""
    high, wide = (size or w.shape[at] for at, size in enumerate(tile))
    tiles = w.view(len(w) // high, high, -1, wide)
    scales = tiles.abs().amax((1, 3)) / 448
    return (tiles / scales[:, None, :, None]).view(w.shape).to(E4M3), scales


def _times(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    high = scales.float().repeat_interleave(len(codes) // len(scales), 0)
    return codes.float() * high.repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def fp8_blocks(size: int) -> Publisher:
    """Tiles of size x size."""
    config = {"quant_method": "fp8", "weight_block_size": [size, size]}
    return Publisher(config, _fp8((size, size), "weight_scale_inv", torch.bfloat16))


def _fp8(tile: tuple[int, int], name: str, dtype: torch.dtype) -> Callable[..., Any]:
    def publish(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales = _e4m3(w, tile)
        scales = scales.to(dtype)
        kept = scales.view(()) if scales.numel() == 1 else scales
        parts = {"weight": codes, name: kept, "input_scale": torch.ones(())}
        return parts, _times(codes, scales)

    return publish


def _four_bits(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of codes for scales [out, groups], and the codes' numbers."""
    spread = scales.repeat_interleave(w.shape[1] // scales.shape[1], 1)
    codes = (w[..., None] / spread[..., None] - E2M1).abs().argmin(-1)
    pairs = codes.view(len(w), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), E2M1[codes]


def _nvfp4(*, divides: bool) -> Callable[..., Any]:
    def publish(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        peaks = w.view(len(w), -1, 16).abs().amax(-1)
        factor = (448 / peaks.max()).reshape(1) * 6
        factor = factor if divides else 1 / factor
        by = 1 / factor if divides else factor
        scales = (peaks / 6 / by).to(E4M3)
        codes, plain = _four_bits(w, scales.float() * by)
        wanted = plain * (scales.float() * by).repeat_interleave(16, 1)
        if divides:
            names = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": factor}
        else:
            names = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor.view(())}
        return names | {"input_scale": torch.ones(())}, wanted

    return publish


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of codes, exponents, and numbers."""
    exponents = w.view(len(w), -1, 32).abs().amax(-1).log2().floor() - 2
    codes, plain = _four_bits(w, torch.exp2(exponents))
    wanted = plain * torch.exp2(exponents).repeat_interleave(32, 1)
    return codes, (exponents + 127).to(torch.uint8), wanted


def _packed_mxfp4(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, exponents, wanted = mxfp4(w)
    return {"weight_packed": codes, "weight_scale": exponents}, wanted


def _mxfp8(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    exponents = w.view(len(w), -1, GROUP).abs().amax(-1).log2().floor() - 8
    codes = (w / torch.exp2(exponents).repeat_interleave(GROUP, 1)).clamp(-448, 448).to(E4M3)
    parts = {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, _times(codes, torch.exp2(exponents))


def _hqq(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Four bits; a byte has a group of the first half in its high nibble."""
    groups = w.view(-1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).half()
    codes = (groups / scales.float() + zeros.float()).round().clamp(0, 15).to(torch.uint8)
    first, second = codes.chunk(2)
    parts = {
        "W_q": first << 4 | second,
        "scale": scales,
        "zero": zeros,
        "shape": torch.tensor(w.shape),
        "axis": torch.tensor(1, dtype=I32),
        "nbits": torch.tensor(4, dtype=I32),
        "group_size": torch.tensor(GROUP, dtype=I32),
        "channel_wise": torch.tensor(1, dtype=torch.uint8),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }
    return parts, ((codes - zeros.float()) * scales.float()).view(w.shape)


def _quanto(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Four bits; a byte has a group of the first half in its low nibble."""
    groups = w.view(-1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales, shifts = ((high - low) / 15).bfloat16(), (-low).bfloat16()
    codes = ((groups + shifts.float()) / scales.float()).round().clamp(0, 15).to(torch.uint8)
    first, second = codes.chunk(2)
    parts = {
        "weight._data._data": first | second << 4,
        "weight._scale": scales,
        "weight._shift": shifts,
        "input_scale": torch.ones(()),
        "output_scale": torch.ones(()),
    }
    return parts, (codes * scales.float() - shifts.float()).view(w.shape)


def _torchao_int4(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    groups = w.view(len(w), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    step, zero = scales.float()[..., None], zeros.float()[..., None]
    codes = ((groups - zero) / step).round().clamp(-8, 7)
    pairs = codes.to(torch.int8).view(len(w), -1, 2)
    parts = {
        "_weight_qdata": pairs[..., 0] & 15 | pairs[..., 1] << 4,
        "_weight_scale": scales.T,
        "_weight_zero_point": zeros.T,
    }
    return parts, (codes * step + zero).view(w.shape)


def _rows_int8(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scales = w.abs().amax(1)
    codes = (w / scales[:, None] * 127).round()
    parts = {"weight": codes.to(torch.int8), "SCB": scales, "weight_format": torch.zeros(1).byte()}
    return parts, codes * (scales / 127)[:, None]


def _table(w: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Four bits by a table, with nested scales of blocks of 64."""
    blocks = w.view(-1, 64)
    scales = torch.linspace(0, 1, 256)
    peaks, offset = blocks.abs().amax(1), 0.25
    size = 256
    outer = torch.stack([part.sub(offset).abs().max() for part in peaks.split(size)])
    each = outer.repeat_interleave(size)[: len(peaks)]
    codes = ((peaks - offset) / each * 255).round().clamp(0, 255).to(torch.uint8)
    peaks = scales[codes.long()] * each + offset
    numbers = (blocks / peaks[:, None])[..., None]
    picked = (numbers - NF4_LIKE).abs().argmin(-1)
    pairs = picked.view(-1, 2)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": list(w.shape),
        "dtype": "float32",
        "nested_blocksize": size,
        "nested_offset": offset,
        "nested_dtype": "float32",
    }
    parts = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": codes,
        "weight.quant_map": NF4_LIKE.clone(),
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": scales,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).to(
            torch.uint8
        ),
    }
    return parts, (NF4_LIKE[picked] * peaks[:, None]).view(w.shape)


_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
PUBLISHERS = {
    "awq": awq(),
    "auto-round": Publisher(
        {"quant_method": "auto-round", "bits": 2, "group_size": GROUP, "sym": False}
        | {"packing_format": "auto_round:auto_gptq"}
        | {"extra_config": {r"mlp\.up": {"bits": 4, "sym": True}, "layers": {"bits": 4}}},
        gptq(4, symmetric=True).publish,
    ),
    "quanto": Publisher({}, _quanto),
    "torchao-int4": Publisher(
        {"quant_method": "torchao"},
        _torchao_int4,
        {"_type": "Int4Tensor", "_data": {"block_size": [1, GROUP]}},
    ),
    "hqq": Publisher({"quant_method": "hqq"}, _hqq),
    "gptq": gptq(4, symmetric=True),
    "gptq-ordered": gptq(4, symmetric=False, ordered=True),
    "gptq-static": gptq(4, symmetric=True, static=True),
    "gptq-v2": gptq(8, symmetric=True, less=0),
    "pack": packed_integers(),
    "int8": _compressed("int-quantized", _CHANNEL, _int8),
    "float": _compressed(
        "float-quantized",
        _FLOAT | {"strategy": "channel"},
        _fp8((1, 0), "weight_scale", torch.bfloat16),
    ),
    "nvfp4": _compressed("nvfp4-pack-quantized", _FLOAT, _nvfp4(divides=True)),
    "mxfp4": _compressed("mxfp4-pack-quantized", _FLOAT, _packed_mxfp4),
    "modelopt-nvfp4": Publisher(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        _nvfp4(divides=False),
    ),
    "modelopt-mxfp8": Publisher({"quant_method": "modelopt", "quant_algo": "MXFP8"}, _mxfp8),
    "modelopt-fp8": Publisher(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        _fp8((0, 0), "weight_scale", torch.float32),
    ),
    "fp8": Publisher(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _fp8((0, 0), "weight_scale_inv", torch.float32),
    ),
    "fp8-blocks": fp8_blocks(32),
    "fbgemm": Publisher(
        {"quant_method": "fbgemm_fp8"}, _fp8((1, 0), "weight_scale", torch.float32)
    ),
    "bnb-int8": Publisher({"quant_method": "bitsandbytes", "load_in_8bit": True}, _rows_int8),
    "bnb-nf4": Publisher({"quant_method": "bitsandbytes", "load_in_4bit": True}, _table),
}
