"""Numbers that stand for types and functions in calls of the extension."""

from typing import Final

import torch

# csrc/base/dtype.h
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# csrc/fused/gated.h
ACTIVATIONS: Final = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swish": 3, "relu": 4, "clamped_silu": 6,
}  # fmt: skip
SIGMOID: Final = 5  # of gates: no FFN has it
