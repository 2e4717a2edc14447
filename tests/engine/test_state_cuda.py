"""Recurrent state on a real GPU: kernels beside the reference, any division, captured steps."""

import random
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.minimax import MiniMaxConfig
from transformers.models.olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import Qwen3NextConfig

import hmt
from hmt.contracts.store import StateRun
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.kernels import ops, reference
from hmt.kernels.reference import DeltaHeads
from hmt.memory.device import open_device

pytestmark = pytest.mark.gpu

HEADS = DeltaHeads(16, 32, 128, 128)  # Qwen3-Next's
# Of the largest result: what rounding results to a dtype is, and of f32 2,000 steps of the rule.
NEAR = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SIZES: dict[str, Any] = {
    "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "linear_head_dim": 64, "linear_num_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "layer_types": KINDS,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **LINEAR),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**SIZES, **LINEAR, **EXPERTS),
    "kimi_linear": lambda: KimiLinearConfig(**SIZES | TOKENS | LATENT),
    "olmo_hybrid": lambda: OlmoHybridConfig(**SIZES, **TOKENS, layer_types=KINDS),
    "minimax": lambda: MiniMaxConfig(
        **SIZES, **TOKENS, layer_types=KINDS, head_dim=64, num_local_experts=4
    ),
    "lfm2": lambda: Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention", "conv", "full_attention"]
    ),
}


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """qkv, decay, rate, decay_scale, decay_bias, and the weight of a convolution."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    count = HEADS.heads
    numbers = [normal(tokens, HEADS.width), 4 * normal(tokens, count), 2 * normal(tokens, count)]
    numbers = [one.to(dtype) for one in numbers]
    return [*numbers, normal(count), normal(count), normal(HEADS.width, 4)]


def compute(
    kernels: Any, numbers: list[Tensor], states: Tensor, tails: Tensor, runs: list[StateRun]
) -> Tensor:
    qkv, decay, rate, scale, bias, weight = numbers
    qkv = kernels.causal_conv(qkv, weight, tails, runs)
    out: Tensor = kernels.gated_delta_rule(qkv, decay, rate, scale, bias, states, runs, HEADS)
    return out


def stores(slots: int, where: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = (slots, 32, 128, 128), (slots, 3, HEADS.width)
    states, tails = (torch.randn(shape, generator=generator).to(where) for shape in shapes)
    return states, tails


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
def test_kernels_are_near_the_reference(dtype: torch.dtype) -> None:
    """Prompts of unequal length, and single tokens, in one step."""
    lengths, at, runs = (700, 1, 33, 1, 2), 0, []
    for slot, length in enumerate(lengths):
        runs.append(StateRun(4 - slot, at, length, slot % 2 == 0))
        at += length
    numbers = inputs(at, dtype)
    own, given = stores(6, "cpu"), stores(6, "cuda")
    wanted = compute(reference, [x.float() for x in numbers], *own, runs)
    found = compute(ops, [x.cuda() for x in numbers], *given, runs)
    assert found.dtype is dtype
    # The convolution is rounded to `dtype` before the rule: by a step of it, results follow.
    most = float(wanted.abs().max())
    assert float((found.cpu().float() - wanted).abs().max()) <= 2 * NEAR[dtype] * most
    near = 2 * NEAR[dtype] * float(own[0].abs().max())
    assert float((given[0].cpu() - own[0]).abs().max()) <= near
    assert torch.equal(given[1].cpu(), own[1]), "tails are the tokens themselves"
    assert torch.equal(given[0][5].cpu(), stores(6, "cpu")[0][5]), "no run has this slot"


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
def test_no_division_changes_a_bit(dtype: torch.dtype) -> None:
    tokens = 2048
    numbers = [x.cuda() for x in inputs(tokens, dtype, 1)]
    states, tails = stores(3, "cuda")
    whole = compute(ops, numbers, states, tails, [StateRun(1, 0, tokens, True)])
    for seed in range(4):
        rng, at, parts = random.Random(seed), 0, []
        others, their_tails = stores(3, "cuda")
        while at < tokens:
            size = min(rng.choice([1, 1, 3, 64, 255, 700]), tokens - at)
            part = [x[at : at + size] for x in numbers[:3]] + numbers[3:]
            runs = [StateRun(0, 0, size, at == 0)]
            beside = rng.random() < 0.5  # another sequence in the same step
            if beside:
                part[:3] = [torch.cat((x[:5], x)) for x in part[:3]]
                runs = [StateRun(0, min(5, size), size, at == 0)]
                runs.insert(0, StateRun(2, 0, min(5, size), False))
            out = compute(ops, part, others, their_tails, runs)
            parts.append(out[-size:])
            at += size
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(others[0], states[1]) and torch.equal(their_tails[0], tails[1])


def test_a_graph_follows_runs_in_the_devices_memory() -> None:
    from hmt.kernels import graph_ops

    where = torch.device("cuda", 0)
    numbers = [x.cuda() for x in inputs(4, torch.bfloat16, 2)]
    fixed = graph_ops.fixed_state_runs(where, 4)
    assert fixed is not None
    own, given = stores(6, "cuda"), stores(6, "cuda")
    first = [StateRun(slot, slot, 1, False, drafts=1) for slot in range(4)]
    graph_ops.fill_state_runs(fixed, first)
    compute(ops, numbers, *given, fixed)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute(ops, numbers, *given, fixed)
    for seed in range(6):
        rng = random.Random(seed)
        slots = rng.sample(range(6), rng.choice([1, 3, 4]))
        runs = [StateRun(slot, n, 1, rng.random() < 0.3) for n, slot in enumerate(slots)]
        graph_ops.fill_state_runs(fixed, runs)
        graph.replay()
        wanted = compute(ops, numbers, *own, runs)
        assert torch.equal(result[: len(runs)], wanted[: len(runs)])
        assert all(map(torch.equal, given, own))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_captured_decoding_is_decoding(name: str, tmp_path: Path) -> None:
    """To the bit, in batches that change; and near transformers on the CPU."""
    torch.manual_seed(3)
    config = CONFIGS[name]()
    other = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    other.save_pretrained(tmp_path)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), tmp_path)
    device = open_device("0")
    device.empty_cache()
    options: dict[str, Any] = {
        "host_memory": "256MiB", "context": 1024, "max_batch": 3, "max_prefill_tokens": 64,
        "gpu_memory": device.used_bytes() + (256 << 20), "dtype": "float32",
    }  # fmt: skip
    rng = random.Random(4)
    tokens = [rng.randrange(16, 500) for _ in range(120)]
    sampling = hmt.Sampling(temperature=1.0, seed=5)
    requests = [
        hmt.Request(tokens[:count], 24, sampling=sampling, ignore_eos=True)
        for count in (3, 100, 1, 65)
    ]
    found = []
    for executor in ("plain", "overlapped"):
        with hmt.Engine(**options, executor=executor) as engine:
            model = engine.load_model(tmp_path)
            answers = [answer.token_ids for answer in model.infer_batch(requests)]
            # The likeliest tokens, so that most steps begin on a right guess.
            answers.append(model.infer(hmt.Request(tokens[:30], 100, ignore_eos=True)).token_ids)
            found.append((answers, model.logits(tokens, range(120), prefill=100)))
            if executor == "overlapped":
                captured = model._core.runner.executor.graphs
                assert isinstance(captured, GraphRunner), model.summary().notes
                assert captured.works and captured.graphs[False], captured.failure
                assert captured.async_steps.right > 10
                assert not model.summary().notes
                again = model.logits(tokens, range(120), prefill=77)
                # Products with f32 weights are torch's, which adds by how many rows there are.
                assert float((again - found[-1][1]).abs().max()) < 1e-3
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    with torch.inference_mode():
        wanted = other(torch.tensor([tokens])).logits[0]
    error = float((found[1][1] - wanted).norm() / wanted.norm())
    assert error < 2e-3, error
