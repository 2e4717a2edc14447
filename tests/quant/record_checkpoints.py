"""Writes checkpoints.safetensors.gz: one weight each as quantisation packages write checkpoints.

For test_checkpoints.py, which runs without these packages.  Made with auto-round 0.16.1,
compressed-tensors 0.20.0, hqq 0.2.8, optimum-quanto 0.2.7 and torchao 0.18.0, by

    pip install --no-deps auto-round==0.16.1 compressed-tensors==0.20.0 hqq==0.2.8.post1 \
        optimum-quanto==0.2.7 torchao==0.18.0 accelerate loguru ninja
    python tests/quant/record_checkpoints.py

A case is a module called MODULE of a checkpoint.  Its tensors are called CASE/TENSOR, and
CASE/wanted is what the package itself makes of them, in f32 unless the case says otherwise: scales
are brought to f32 first, as packages compute in the scales' dtype.  The file's metadata has for
each case what config.json says, and the metadata of the file that the tensors were in.
"""

import gzip
import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS, GROUP = 32, 64, 32
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """config: of config.json; metadata: of the safetensors file; files: others beside it."""

    config: dict[str, Any]
    tensors: Tensors
    wanted: torch.Tensor
    metadata: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)


def linear(
    seed: int, dtype: torch.dtype = torch.float32, rows: int = ROWS, columns: int = COLUMNS
) -> torch.nn.Linear:
    random = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
    layer.weight.data = (torch.randn(rows, columns, generator=random) * 0.05).to(dtype)
    return layer


def named(parts: Tensors) -> Tensors:
    return {f"{MODULE}.{name}": part for name, part in parts.items()}


def section(config: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": config}


def auto_round(packing: str, width: int, *, symmetric: bool, **fields: Any) -> Case:
    """As its exporter packs weights that were rounded to the nearest."""
    from auto_round.export.export_to_autoround.export import (
        dynamic_import_quant_linear_for_packing,
    )

    layer, largest = linear(width), (1 << width) - 1
    groups = layer.weight.data.view(ROWS, -1, GROUP)
    zeros: Any
    if symmetric:
        scales = 2 * groups.abs().amax(-1) / largest
        zeros = 1 << width - 1
    else:
        scales = (groups.amax(-1) - groups.amin(-1)) / largest
        zeros = (-groups.amin(-1) / scales).round().clamp(1, largest)
    scales = scales.half().float()
    spread = zeros if symmetric else zeros[..., None]
    codes = (groups / scales[..., None] + spread).round().clamp(0, largest)
    layer.weight.data = ((codes - spread) * scales[..., None]).view(ROWS, COLUMNS)
    make = dynamic_import_quant_linear_for_packing(packing, width, GROUP, symmetric, 16)
    if "awq" in packing:
        spread = torch.full_like(scales, zeros) if symmetric else zeros
        packed = make.from_linear(
            layer, width, GROUP, scales=scales.T.contiguous(), zeros=spread.T.contiguous()
        )
        wanted = layer.weight.data
    else:
        packed = make(width, GROUP, COLUMNS, ROWS, False)
        packed.device = "cpu"
        packed.pack(layer, scales, zeros, None)
        kept = packed.scales
        packed.scales = kept.float()
        wanted = packed(torch.eye(COLUMNS)).T
        packed.scales = kept
        assert torch.equal(wanted, layer.weight.data)
    config = {"quant_method": "auto-round", "bits": width, "group_size": GROUP, "sym": symmetric}
    more = {"packing_format": packing, "data_type": "int", "iters": 0}
    tensors = named(dict(packed.state_dict()))
    return Case(section(config | more | fields), tensors, wanted)


def without_packing(case: Case, **fields: Any) -> Case:
    config = case.config["quantization_config"] | fields
    del config["packing_format"]
    return replace(case, config=section(config))


def auto_round_floats(bits: int, data_type: str) -> Case:
    """Its exporter of NVFP4, MXFP4 and MXFP8."""
    from auto_round.data_type.utils import get_quant_func
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear

    layer = linear(bits)
    size = 16 if data_type == "nv_fp" else GROUP
    quantise, _ = get_quant_func(data_type, bits, True)
    rounded, scales, _ = quantise(layer.weight.data, bits=bits, group_size=size)
    packed = QuantLinear(bits, size, COLUMNS, ROWS, False, data_type=data_type, sym=True)
    layer.weight.data = rounded
    packed.device = "cpu"
    packed.pack(layer, scales.reshape(ROWS, -1))  # as its wrapper of layers keeps them
    config = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
    config |= {"bits": bits, "group_size": size, "data_type": data_type, "sym": True}
    return Case(section(config), named(dict(packed.state_dict())), rounded.float())


def mxfp8(method: str) -> Case:
    """compressed-tensors' compressor; ModelOpt and SGLang write the same arrays."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP8A16

    scheme = QuantizationScheme(targets=["Linear"], format="mxfp8-quantized", **MXFP8A16)
    values = linear(8).weight.data
    peaks = values.view(ROWS, -1, GROUP).abs().amax(-1)
    state = {"weight": values, "weight_scale": torch.exp2(peaks.log2().floor() - 8)}
    compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    published = compressor.compress(state, scheme)
    wanted = compressor.decompress(dict(published), scheme)["weight"].float()
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    name = "weight_scale_inv" if method == "mxfp8" else "weight_scale"
    tensors = {"weight": published["weight"], name: published["weight_scale"]}
    config = {
        "compressed-tensors": {"config_groups": {"group_0": group}, "format": "mxfp8-quantized"},
        "modelopt": {"quant_algo": "MXFP8"},
        "mxfp8": {"activation_scheme": "dynamic", "weight_block_size": [1, 32]},
    }[method]
    return Case(section({"quant_method": method} | config), named(tensors), wanted)


def hqq(bits: int, axis: int, dtype: torch.dtype, **fields: Any) -> Case:
    """Its layer's state, which transformers saves.  With groups of rows (axis 0) in `dtype`."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    options = BaseQuantizeConfig(nbits=bits, axis=axis, **{"group_size": GROUP} | fields)
    layer = HQQLinear(linear(bits), options, compute_dtype=dtype, device="cpu")
    meta = dict(layer.meta)
    if axis:
        exact = {name: meta[name].float() for name in ("scale", "zero")}
        meta |= exact | {"compute_dtype": torch.float32}
    wanted = Quantizer.dequantize(layer.W_q.data, meta)
    tensors = {name: part for name, part in layer.state_dict().items() if part is not None}
    config = {"quant_method": "hqq", "quant_config": options, "skip_modules": ["lm_head"]}
    return Case(section(config), named(tensors), wanted)


def torchao(config: Any, dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS) -> Case:
    """Its quantize_, and its state as transformers saves it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    layer = linear(7, dtype, rows, columns)
    quantize_(layer, config)
    w = layer.weight.data
    tensors, metadata = flatten_tensor_state_dict({f"{MODULE}.weight": w})
    if hasattr(w, "target_dtype"):
        wanted = dequantised(w, w.target_dtype)
    elif w.qdata.dtype is torch.int8:
        wanted = dequantised(w, torch.int8)
    else:
        wanted = w.dequantize(torch.float32)
    return Case(section({"quant_method": "torchao"}), tensors, wanted, metadata)


def dequantised(w: Any, dtype: torch.dtype) -> torch.Tensor:
    from torchao.quantization.quant_primitives import _DTYPE_TO_QVALUE_BOUNDS, dequantize_affine

    low, high = _DTYPE_TO_QVALUE_BOUNDS[dtype]
    args = (w.qdata, w.block_size, w.scale.float(), w.zero_point, torch.int8, low, high)
    return dequantize_affine(*args, output_dtype=torch.float32)


def torchao_int4() -> Case:
    """Its class for fbgemm's kernel, whose quantiser needs a GPU package: rounded here instead.

    fbgemm's codes are -8 to 7, two neighbours in a byte, the first in the low nibble, and a number
    is code * scale + zero (fbgemm_gpu, int4_row_quantize_zp and pack_int4).
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor

    groups = linear(9).weight.data.view(ROWS, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    wanted = (codes * scales.float()[..., None] + zeros.float()[..., None]).view(ROWS, COLUMNS)
    pairs = codes.to(torch.int8).view(ROWS, -1, 2)
    qdata = pairs[..., 0] & 15 | pairs[..., 1] << 4
    w = Int4Tensor(qdata, scales.T.contiguous(), zeros.T.contiguous(), [1, GROUP], wanted.shape)
    tensors, metadata = flatten_tensor_state_dict({f"{MODULE}.weight": w})
    return Case(section({"quant_method": "torchao"}), tensors, wanted, metadata)


def quanto(
    kind: str,
    *,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.float16,
    zero_points: bool = False,
) -> Case:
    """A module's state, which its QuantizedModelForCausalLM saves, and the map beside it."""
    from optimum.quanto import MaxOptimizer, freeze, qtypes, quantization_map, quantize

    class Whole(MaxOptimizer):
        def __call__(self, base: Any, qtype: Any, axis: int, group_size: Any = None) -> Any:
            return super().__call__(base, qtype, axis, group_size, zeropoint=True)

    random = torch.Generator().manual_seed(11)
    model = torch.nn.Module()
    names = MODULE.split(".")
    inner = model
    for name in names[:-1]:
        inner.add_module(name, torch.nn.Module())
        inner = inner.get_submodule(name)
    layer = torch.nn.Linear(columns, ROWS, bias=False, dtype=dtype)
    layer.weight.data = (torch.randn(ROWS, columns, generator=random) * 0.05).to(dtype)
    inner.add_module(names[-1], layer)
    quantize(model, weights=qtypes[kind], optimizer=Whole() if zero_points else None)
    freeze(model)
    w = model.get_submodule(MODULE).weight
    w._scale = w._scale.float()
    if hasattr(w, "_shift") and w._shift.dtype.is_floating_point:
        w._shift = w._shift.float()
    wanted = w.dequantize()
    again = {
        name: part.to(dtype)
        if name.endswith(("_scale", "_shift")) and part.dtype is torch.float32
        else part
        for name, part in model.state_dict().items()
    }
    return Case({}, again, wanted, files={"quanto_qmap.json": quantization_map(model)})


def cases() -> dict[str, Case]:
    gptq, awq = "auto_round:auto_gptq", "auto_round:auto_awq"
    plain = auto_round("auto_round", 4, symmetric=True)
    mixed = {"extra_config": {MODULE: {"bits": 8, "sym": True}}}
    by_pattern = {"extra_config": {"re": {"bits": 2}, r".*mlp\.up.*": {"bits": 6}}}
    import torchao.quantization as ao
    from torchao.prototype.mx_formats.inference_workflow import (
        MXDynamicActivationMXWeightConfig,
        NVFP4WeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup, PerTensor

    int4 = {"weight_dtype": torch.int4, "granularity": PerGroup(GROUP)}
    uneven = {"mapping_type": ao.MappingType.ASYMMETRIC}
    bf16 = torch.bfloat16
    return {
        "torchao-int8": torchao(ao.Int8WeightOnlyConfig(version=2), bf16),
        "torchao-int8-dynamic": torchao(
            ao.Int8DynamicActivationInt8WeightConfig(version=2), torch.float16
        ),
        "torchao-int8-group": torchao(
            ao.Int8WeightOnlyConfig(version=2, granularity=PerGroup(GROUP)), bf16
        ),
        "torchao-int8-tensor": torchao(
            ao.Int8WeightOnlyConfig(version=2, granularity=PerTensor()), bf16
        ),
        "torchao-intx-4": torchao(ao.IntxWeightOnlyConfig(**int4), bf16),
        "torchao-intx-4-zeros": torchao(ao.IntxWeightOnlyConfig(**int4, **uneven), bf16),
        "torchao-intx-8-zeros": torchao(ao.IntxWeightOnlyConfig(torch.int8, **uneven), bf16),
        "torchao-int4": torchao_int4(),
        "torchao-float8": torchao(ao.Float8WeightOnlyConfig(), bf16),
        "torchao-nvfp4": torchao(NVFP4WeightOnlyConfig(), bf16, rows=144, columns=96),
        "torchao-mxfp8": torchao(MXDynamicActivationMXWeightConfig(), bf16, rows=144, columns=160),
        "quanto-int8": quanto("qint8"),
        "quanto-int4": quanto("qint4"),
        "quanto-int4-groups": quanto("qint4", columns=160, dtype=torch.bfloat16),
        "quanto-int4-zeros": quanto("qint4", zero_points=True),
        "quanto-int2": quanto("qint2"),
        "quanto-float8": quanto("qfloat8_e4m3fn", dtype=torch.bfloat16),
        "auto-round-gptq": auto_round(gptq, 4, symmetric=True),
        "auto-round-gptq-zeros": auto_round(gptq, 4, symmetric=False),
        "auto-round-gptq-3": auto_round(gptq, 3, symmetric=True),
        "auto-round-gptq-5-zeros": auto_round(gptq, 5, symmetric=False),
        "auto-round-gptq-6-by-pattern": auto_round(gptq, 6, symmetric=True, **by_pattern),
        "auto-round-mixed": auto_round(gptq, 8, symmetric=True, bits=4, **mixed),
        "auto-round-plain-zeros": auto_round("auto_round", 2, symmetric=False),
        "auto-round-awq": auto_round(awq, 4, symmetric=True),
        "auto-round-awq-zeros": auto_round(awq, 4, symmetric=False),
        "auto-round-unsaid": without_packing(auto_round(gptq, 4, symmetric=True)),
        "auto-round-unsaid-zeros": without_packing(auto_round(gptq, 4, symmetric=False)),
        "auto-round-unsaid-plain": without_packing(plain, quant_method="intel/auto-round"),
        "auto-round-mxfp4": auto_round_floats(4, "mx_fp"),
        "auto-round-mxfp8": auto_round_floats(8, "mx_fp"),
        "hqq-8": hqq(8, 1, torch.float16),
        "hqq-4": hqq(4, 1, torch.bfloat16),
        "hqq-4-as-floats": hqq(4, 1, torch.float16, view_as_float=True),
        "hqq-4-rows": hqq(4, 1, torch.float16, group_size=None),
        "hqq-3": hqq(3, 1, torch.float16),
        "hqq-2": hqq(2, 1, torch.bfloat16, group_size=16),
        "hqq-1": hqq(1, 1, torch.float16),
        "hqq-4-columns": hqq(4, 0, torch.bfloat16),
        "hqq-8-columns": hqq(8, 0, torch.float16, group_size=8),
        "mxfp8": mxfp8("compressed-tensors"),
        "mxfp8-modelopt": mxfp8("modelopt"),
        "mxfp8-sglang": mxfp8("mxfp8"),
    }


def shortened(wanted: torch.Tensor) -> torch.Tensor:
    """In bf16 where that holds it."""
    short = wanted.bfloat16()
    return short if torch.equal(short.to(wanted.dtype), wanted) else wanted


def main() -> None:
    warnings.simplefilter("ignore")
    recorded = cases()
    tensors = {
        f"{name}/{end}": part.detach().clone().contiguous()
        for name, case in recorded.items()
        for end, part in (case.tensors | {"wanted": shortened(case.wanted)}).items()
    }
    about = {
        name: {"config": case.config, "metadata": case.metadata, "files": case.files}
        for name, case in recorded.items()
    }
    content = save(tensors, metadata={"cases": json.dumps(about)})
    path = Path(__file__).with_name("checkpoints.safetensors.gz")
    path.write_bytes(gzip.compress(content, mtime=0))
    print(f"{len(recorded)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
