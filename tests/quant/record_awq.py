"""Writes awq.safetensors: what llm-compressor's AWQ searches through, for test_scaling.py.

That test runs without the package.  Made with llmcompressor 0.14.0.1 and compressed-tensors 0.20.0
(on a CPU), by

    pip install llmcompressor==0.14.0.1
    python tests/quant/record_awq.py

`first` and `second` are two linear layers with the same `inputs`; CASE/errors are the mean squared
errors of all that the package tries, CASE/factors what it chooses.
"""

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import (
    initialize_module_for_quantization,
)
from llmcompressor.modifiers.quantization.calibration import initialize_observer
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from safetensors.torch import save_file
from torch import nn

COLUMNS, TOKENS = 64, 80
CASES = {"int4": (4, True), "int3": (3, True), "zeros4": (4, False)}


class Both(nn.Module):
    """Two linear layers, side by side."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, len(w), bias=False) for w in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All outputs."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class Recording(AWQModifier):
    """Remembers its errors."""

    def _compute_loss(self, *outputs: list[torch.Tensor]) -> float:
        error = super()._compute_loss(*outputs)
        ERRORS.append(error)
        return error


ERRORS: list[float] = []


def searched(weights: list[torch.Tensor], inputs: torch.Tensor, bits: int, symmetric: bool):
    """Errors of all factors that are tried, and those of the least."""
    parent = Both(weights)
    args = QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric
    )
    for layer in parent.layers:
        initialize_module_for_quantization(
            layer, QuantizationScheme(targets=["Linear"], weights=args)
        )
        initialize_observer(layer, "weight")
        layer.quantization_enabled = False  # its weight is rounded by the search itself
    mapping = ResolvedMapping("norm", nn.Identity(), list(parent.layers), [], parent, "parent")
    modifier = Recording(duo_scaling=False, mappings=[])
    count = torch.tensor(len(inputs))
    modifier._smooth_activation_stats["norm"] = [inputs.abs().sum(0), count]
    modifier._parent_args_cache[parent] = [{"x": inputs}]
    kept = {layer: layer.weight.clone() for layer in parent.layers}
    ERRORS.clear()
    with torch.no_grad():
        factors = modifier._compute_best_scale(mapping, [parent(inputs)], kept)
    return torch.tensor(ERRORS), factors


def main() -> None:
    """Write the file."""
    random = torch.Generator().manual_seed(11)
    inputs = torch.randn(TOKENS, 16, generator=random) @ torch.randn(16, COLUMNS, generator=random)
    inputs *= torch.exp(torch.randn(COLUMNS, generator=random))
    weights = [0.05 * torch.randn(rows, COLUMNS, generator=random) for rows in (8, 12)]
    made = {"inputs": inputs, "first": weights[0], "second": weights[1]}
    for case, (bits, symmetric) in CASES.items():
        found = searched(weights, inputs, bits, symmetric)
        made[f"{case}/errors"], made[f"{case}/factors"] = found
    save_file(made, Path(__file__).parent / "awq.safetensors")


if __name__ == "__main__":
    main()
