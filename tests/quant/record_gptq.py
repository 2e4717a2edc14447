"""Writes gptq.safetensors: weights as llm-compressor's GPTQ rounds them, for test_gptq_peer.py.

That test runs without the package.  Made with llmcompressor 0.14.0.1 and compressed-tensors 0.20.0
(on a CPU), by

    pip install llmcompressor==0.14.0.1
    python tests/quant/record_gptq.py

`weight` and `hessian` (a mean over tokens) are given to all cases, with the scales that HMT finds;
CASE/scales are these, CASE/zeros its zero points, and CASE/numbers what the package makes of the
weight.
"""

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from safetensors.torch import save_file

from hmt.quant.methods.interface import Target
from hmt.quant.methods.rounding import importance, round_weight

ROWS, COLUMNS, TOKENS = 12, 64, 200
CASES = {
    "int4": (Target(), None),
    "int4-ordered": (Target(), "weight"),
    "int3-ordered": (Target(bits=3), "weight"),
    "int2-ordered": (Target(bits=2, group_size=16), "weight"),
    "zeros4-ordered": (Target(symmetric=False), "weight"),
}


def inputs() -> torch.Tensor:
    """Of very different size, and such that depend on each other."""
    random = torch.Generator().manual_seed(7)
    mixed = torch.randn(TOKENS, 16, generator=random) @ torch.randn(16, COLUMNS, generator=random)
    mixed += 0.3 * torch.randn(TOKENS, COLUMNS, generator=random)
    return mixed * torch.exp(torch.randn(COLUMNS, generator=random))


def main() -> None:
    """Write the file."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8)) * 0.05
    rows = inputs()
    hessian = rows.T @ rows / TOKENS
    made = {"weight": weight, "hessian": hessian}
    for case, (target, order) in CASES.items():
        start = round_weight(weight, target, importance(hessian))
        zeros = torch.zeros(start.scales.shape)
        if start.zero_points is not None:
            zeros = start.zero_points.float()
            made[f"{case}/zeros"] = start.zero_points
        args = QuantizationArgs(
            num_bits=target.bits, type="int", strategy="group", group_size=target.group_size,
            symmetric=target.symmetric, actorder=order,
        )  # fmt: skip
        found, _, _ = quantize_weight(
            weight.clone()[None], hessian.clone()[None], start.scales[None], zeros[None], None, args
        )
        made[f"{case}/scales"], made[f"{case}/numbers"] = start.scales, found[0].contiguous()
    save_file(made, Path(__file__).parent / "gptq.safetensors")


if __name__ == "__main__":
    main()
