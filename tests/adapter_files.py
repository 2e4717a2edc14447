"""Random adapters as peft writes them, and peft's own model with them as the oracle."""

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns of what is to go
    from peft import LoraConfig, get_peft_model

# Of all families that HMT adapts, by what they are called in transformers.
LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj",
    "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "in_proj_qkv", "in_proj_z",
    "in_proj_qkvz", "in_proj_ba", "in_proj_a", "in_proj_b", "out_proj", "in_proj",
)  # fmt: skip
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    reference: Any, folder: Path, seed: int, *, rank: int = 4, targets: Any = None, **options: Any
) -> Any:
    """A random adapter of `reference` in `folder`; peft's model with it, in f32."""
    names = {name.rpartition(".")[2] for name, _ in reference.named_modules()}
    targets = targets or sorted(names & set(LINEARS))
    if "experts" in names:  # whose matrices are no modules: see test_adapters.py
        targets = sorted({*targets} - {"gate_proj", "up_proj", "down_proj"})
    config = LoraConfig(
        r=rank, lora_alpha=options.pop("lora_alpha", 3 * rank), target_modules=targets, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is to go
        adapted = get_peft_model(copy.deepcopy(reference), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, numbers in adapted.named_parameters():
            if ".lora_" in name:
                drawn = torch.randn(numbers.shape, generator=generator)
                numbers.copy_(drawn * 0.1 * min(numbers.shape) ** -0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return adapted


def rewritten(
    folder: Path,
    change: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """`folder` with other fields of its configuration, and with other tensors."""
    if change is not None:
        config = json.loads((folder / CONFIG).read_text()) | change
        (folder / CONFIG).write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All matrices of the adapter in `folder`."""
    found: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    return found


def answers(adapted: Any, tokens: Sequence[int], **options: Any) -> torch.Tensor:
    """Logits f32 [tokens, vocab] of transformers' or peft's model."""
    with torch.inference_mode():
        found: torch.Tensor = adapted(torch.tensor([list(tokens)]), **options).logits[0].float()
    return found
