"""Models that HMT has no file for, through transformers' modules: equal to plain transformers."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import after_first
from plain_memory import Bench, ResidentWeights, published, put_tokenizer, random_reference
from transformers import CONFIG_MAPPING

import hmt
from hmt.base.errors import CheckpointError, UnknownArchitectureError
from hmt.contracts.blocks import BlockKind
from hmt.contracts.encoding import Encoding
from hmt.contracts.plan import Plan, Tier
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading import packs
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.memory.device import open_device
from hmt.models import open_model
from hmt.planner import PlanOptions, smallest_budget

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 4  # of the weights, what may be in memory
PROMPT_TOKENS, TOKENS = 35, 40
OPTIONS = {
    "dtype": "float32",
    "context": 64,
    "max_prefill_tokens": 16,
    "max_batch": 3,
    "threads": 1,
}
SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Other:
    """A family.

    own        attention is the model's code, over what HMT's pages hold
    budgets    it is run through the engine, at a quarter of the memory
    """

    config: dict[str, Any] = field(default_factory=dict)
    own: bool = False
    experts: bool = False
    budgets: bool = True
    without: tuple[str, ...] = ()


NO_KV_HEADS = ("num_key_value_heads",)
OTHERS = {
    "bloom": Other({"n_head": 4, "n_layer": 6}, own=True, budgets=False, without=NO_KV_HEADS),
    "cohere": Other({"logit_scale": 0.3, "use_qk_norm": True}),
    "falcon": Other({"multi_query": True}, own=True),
    "gemma2": Other(
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}, budgets=False
    ),
    "glm4": Other({"head_dim": 16}),
    "gpt2": Other(budgets=False, without=(*NO_KV_HEADS, "intermediate_size")),
    "gpt_neox": Other({"rotary_pct": 0.5}, without=NO_KV_HEADS),
    "granite": Other({"logits_scaling": 2.0, "attention_multiplier": 0.2}),
    "granitemoe": Other(
        {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
        experts=True,
    ),
    "minicpm3": Other(
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
        budgets=False,
    ),
    "olmo2": Other({"tie_word_embeddings": True}),
    "olmoe": Other(EXPERTS, experts=True, budgets=False),
    "opt": Other({"ffn_dim": 96, "word_embed_proj_dim": 48}, budgets=False, without=NO_KV_HEADS),
    "phi": Other({"partial_rotary_factor": 0.5}),
    "qwen2_moe": Other({**EXPERTS, "shared_expert_intermediate_size": 48}, experts=True),
    "stablelm": Other({"use_qkv_bias": True}),
    "starcoder2": Other({"sliding_window": 9, "use_bias": True}),
}


def config_of(kind: str) -> Any:
    other = OTHERS[kind]
    sizes = {name: size for name, size in SIZES.items() if name not in other.without}
    return CONFIG_MAPPING[kind](**sizes | other.config)


def texts_for(kind: str) -> list[list[int]]:
    rng = random.Random(len(kind))
    return [[rng.randrange(1, 400) for _ in range(TOKENS - 9 * n)] for n in range(3)]


def logits_of(reference: Any, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([text])).logits[0]
    return logits


def check(reference: Any, text: list[int], found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Our logits differ no more than transformers' two attentions do, times four, or next to it."""
    differs = 0.0
    if reference._supports_sdpa and reference._can_set_attn_implementation():
        reference.set_attn_implementation("sdpa")
        differs = float((logits_of(reference, text) - wanted).abs().max())
    assert float((found - wanted).abs().max()) <= max(4 * differs, 2e-5 * float(wanted.std()))


class Noting(ResidentWeights):
    """Also notes what routers saw and chose."""

    seen: list[tuple[int, torch.Tensor, torch.Tensor]]

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self.seen.append((layer, hidden.clone(), experts.clone()))


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_equal_transformers_in_chunks_and_together(kind: str, tmp_path: Path) -> None:
    """Two sequences, chunks and single tokens mixed; every tensor of the checkpoint is used."""
    other, reference = OTHERS[kind], random_reference(config_of(kind), seed=len(kind))
    config, tensors = published(reference, tmp_path)
    model: Any = open_model(config, tmp_path, torch.float32)
    bench = Bench(model, tensors)
    noting = Noting(model.spec, tensors)
    noting.seen = []
    bench.weights = noting
    (first, second, _) = texts_for(kind)
    steps = [(20, 0), (1, 11), (9, 1), (1, 1), (9, 18)]
    at, parts = [0, 0], ([], [])
    for counts in steps:
        taken = [
            (n, at[n], text[at[n] : at[n] + count])
            for n, (text, count) in enumerate(zip((first, second), counts, strict=True))
            if count
        ]
        logits = bench.run(*taken)
        for (n, _, part), rows in zip(taken, logits.split([len(t[2]) for t in taken]), strict=True):
            parts[n].append(rows)
            at[n] += len(part)
    assert at == [len(first), len(second)]
    wanted = [logits_of(reference, text) for text in (first, second)]
    for text, rows, whole in zip((first, second), parts, wanted, strict=True):
        check(reference, text, torch.cat(rows), whole)
    assert set(tensors) == noting.used
    kinds = {block.id.kind for block in model.spec.blocks if block.id.layer >= 0}
    routed = {BlockKind.ROUTER, BlockKind.EXPERT} if other.experts else {BlockKind.FFN}
    assert kinds == {BlockKind.ATTENTION} | routed
    assert model._tree.own_attention == other.own
    assert bool(noting.seen) == other.experts
    with torch.inference_mode():
        for layer, hidden, experts in noting.seen[:9]:
            assert torch.equal(model.expected_experts(layer, hidden, noting), experts)


def publish(kind: str, folder: Path) -> Any:
    """A random model, written to `folder` with a tokenizer."""
    reference = random_reference(config_of(kind), seed=len(kind))
    published(reference, folder)
    put_tokenizer(folder)
    return reference


# The first: a cache of their own, experts, and none of both.
BUDGETS = ["falcon", "granitemoe", "phi"]
BUDGETS += after_first((k for k, o in OTHERS.items() if o.budgets and k not in BUDGETS), 0)


@pytest.mark.parametrize("kind", BUDGETS)
def test_every_budget_and_both_executors_give_the_same(kind: str, tmp_path: Path) -> None:
    """At most a quarter of the weights in memory; in chunks, token by token, alone, with others."""
    reference, texts = publish(kind, tmp_path), texts_for(kind)
    prepared = prepare(tmp_path, EngineConfig.resolve(host_memory="256MiB", **OPTIONS))
    least = smallest_budget(prepared.demand, PlanOptions(0, 64, 16))
    found, answers = [], []
    for executor in ("plain", "overlapped"):
        with hmt.Engine(host_memory=least, executor=executor, **OPTIONS) as engine:
            model = engine.load_model(tmp_path)
            held = sum(model.plan.reserved[purpose] for purpose in ("resident", "slots"))
            assert held <= prepared.demand.weight_bytes // SHARE
            assert "transformers' modules" in model.summary().notes[0]
            found.append(model.logits(texts[0], range(TOKENS), prefill=PROMPT_TOKENS))
            requests = [
                hmt.Request(input=text, max_new_tokens=2, ignore_eos=True) for text in texts
            ]
            answers.append([answer.token_ids for answer in model.infer_batch(requests)])
    assert torch.equal(*found)
    assert answers[0] == answers[1]
    wanted = [logits_of(reference, text) for text in texts]
    check(reference, texts[0], found[0], wanted[0])
    assert [tokens[0] for tokens in answers[0]] == [int(logits[-1].argmax()) for logits in wanted]


def test_a_pack_of_fewer_bits_computes_the_same_as_converting_on_load(tmp_path: Path) -> None:
    publish("granitemoe", tmp_path / "model")
    config = EngineConfig.resolve(quantization="w8a16", host_memory="64MiB", **OPTIONS)
    packs.convert(tmp_path / "model", tmp_path / "pack", config)
    [text, *_] = texts_for("granitemoe")
    found = []
    for folder, scheme in (("model", "w8a16"), ("pack", None)):
        with hmt.Engine(host_memory="64MiB", quantization=scheme, **OPTIONS) as engine:
            model = engine.load_model(tmp_path / folder)
            kinds = {b.kind for b, layout in model.prepared.layouts.items() for p in layout.placed
                     if p.format.encoding is Encoding.INT8_CHANNEL}  # fmt: skip
            assert kinds == {BlockKind.ATTENTION, BlockKind.EXPERT, BlockKind.HEAD}
            found.append(model.logits(text, range(TOKENS), prefill=PROMPT_TOKENS))
    assert torch.equal(*found)


# The model's own attention; experts; a table of positions, and matrices around the layers.
ON_DEVICES = {
    "falcon": [(True, "overlapped")],
    "granitemoe": [(False, "overlapped"), (True, "overlapped"), (True, "plain")],
    "opt": [(True, "plain")],
}


def test_a_device_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all blocks there, and with some copied in every step and some left to the CPU."""
    monkeypatch.setenv("HMT_POISON", "on")
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    for kind, runs in ON_DEVICES.items():
        folder = tmp_path / kind
        reference, texts = publish(kind, folder), texts_for(kind)
        wanted = [logits_of(reference, text) for text in texts]
        for some, executor in runs:
            found, answers, plan = on_device(folder, "fake", texts, some=some, executor=executor)
            homes = {plan.homes[b] for b in plan.homes if b.kind is not BlockKind.EMBEDDING}
            assert (Tier.HOST in homes) is some and Tier.DEVICE in homes
            check(reference, texts[0], found, wanted[0])
            assert answers == [int(logits[-1].argmax()) for logits in wanted]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OTHERS)
def test_a_gpu_computes_the_same(kind: str, tmp_path: Path) -> None:
    reference, texts = publish(kind, tmp_path), texts_for(kind)
    wanted = logits_of(reference, texts[0])
    for some in (False, True):
        found, _, plan = on_device(tmp_path, "0", texts, some=some)
        assert plan.device.stages
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def on_device(
    folder: Path, gpu: str, texts: list[list[int]], *, some: bool, executor: str = "overlapped"
) -> tuple[torch.Tensor, list[int], Plan]:
    """Logits of the first text, first tokens of answers to all, and the plan.

    some   not all blocks find room on the device
    """
    device = open_device("fake" if gpu == "fake" else f"cuda:{gpu}")
    device.empty_cache()
    least = device.used_bytes() + (1 << 30)
    options = OPTIONS | {"gpus": gpu, "host_memory": "256MiB", "executor": executor}
    if some:
        config = EngineConfig.resolve(gpu_memory=least, **options)
        plan = prepare(folder, config, devices=[device], device_bytes=[1 << 30]).plan
        sizes = plan.device.reserved
        least = device.used_bytes() + int((sum(sizes.values()) - sizes["resident"] // 2) / 0.98)
    with hmt.Engine(gpu_memory=least, **options) as engine:
        model = engine.load_model(folder)
        found = model.logits(texts[0], range(TOKENS), prefill=PROMPT_TOKENS)
        requests = [hmt.Request(input=text, max_new_tokens=3, ignore_eos=True) for text in texts]
        answers = [answer.token_ids[0] for answer in model.infer_batch(requests)]
        return found, answers, model.plan


LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}
REFUSED = {
    "bart": ({"is_encoder_decoder": True}, "BartForCausalLM", "encoder beside its decoder"),
    "bert": ({"num_attention_heads": 2}, "BertLMHeadModel", "it is an encoder"),
    "llama": ({}, "OlmoForCausalLM", "'llama' is not that of a OlmoForCausalLM"),
    "rwkv": ({}, "RwkvForCausalLM", "keeps nothing of earlier tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(kind: str) -> None:
    changes, name, says = REFUSED[kind]
    config = {**LAYERS, **changes, "model_type": kind, "architectures": [name]}
    with pytest.raises(CheckpointError, match=says) as caught:
        open_model(config, Path("some/where"), torch.float32)
    assert isinstance(caught.value, UnknownArchitectureError) == (kind != "llama")
