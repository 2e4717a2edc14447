"""Other encodings than f32: bf16 activations, and DeepSeek's FP8 blocks."""

from pathlib import Path

import pytest
import torch
from plain_memory import Bench, bench_of, published, random_reference
from random_configs import Case, case_of

from hmt.models import open_model

PROMPT = [7, 3, 99, 250, 12, 8, 1, 44, 190, 77, 31, 5, 2, 17, 63, 120]
TILE = (8, 16)


def rms(x: torch.Tensor) -> float:
    return x.pow(2).mean().sqrt().item()


def by_name(*names: str) -> list[Case]:
    return [case_of(name) for name in names]


@pytest.mark.parametrize(
    "case",
    by_name("llama-1", "gemma3_text-1", "qwen3-2", "deepseek_v2-1", "qwen3_5_text-0", "lfm2-0"),
    ids=lambda c: c.name,
)
def test_bf16_is_as_close_to_f32_as_transformers(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rounded = random_reference(case.config, case.seed).bfloat16()
    bench = bench_of(rounded, tmp_path, torch.bfloat16)
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        theirs = rounded(tokens).logits[0].float()
        exact = rounded.float()(tokens).logits[0]
    assert 0 < rms(bench.run((1, 0, PROMPT)) - exact) < 1.3 * rms(theirs - exact)


@pytest.mark.parametrize("case", by_name("deepseek_v3-0", "deepseek_v3-2"), ids=lambda c: c.name)
def test_fp8_blocks_equal_their_numbers(case: Case, tmp_path: Path) -> None:
    """All linear layers, and kv_b_proj in absorbed and in expanded attention."""
    config, tensors = published(random_reference(case.config, case.seed), tmp_path)
    generator = torch.Generator().manual_seed(case.seed)
    stored, numbers = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if ("self_attn" in name and tensor.ndim == 2) or "experts." in name:
            tiles = [-(-size // tile) for size, tile in zip(tensor.shape, TILE, strict=True)]
            scales = torch.rand(tiles, generator=generator) + 0.5
            full = scales.repeat_interleave(TILE[0], 0).repeat_interleave(TILE[1], 1)
            full = full[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = (tensor / full).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            numbers[name] = stored[name].float() * full
    model = open_model(config, tmp_path, torch.float32)
    logits = []
    for bench in (Bench(model, stored, TILE), Bench(model, numbers)):
        parts = [bench.run((1, 0, PROMPT[:10])), bench.run((1, 10, PROMPT[10:12]))]
        logits.append(torch.cat([*parts, bench.run((1, 12, PROMPT[12:]))]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
