"""Steps of weights in every GGUF type are captured, and tokens are looked up where they compute.

One file has them all: each layer of a small mixture of experts is in another type.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

import hmt
from hmt.contracts.encoding import BLOCK_SHAPES
from hmt.contracts.plan import Tier
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.weights.store import device_store

HIDDEN, HEADS, VOCABULARY = 256, 4, 64
# (numbers, bytes) of a block, and where f16 numbers are in it; at byte 0 where nothing is said.
BLOCKS = {one.name: (shape.numbers, shape.nbytes) for one, shape in BLOCK_SHAPES.items()}
BLOCKS |= {"Q4_0": (32, 18), "Q4_1": (32, 20), "MXFP4": (32, 17)}
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
LAYERS = list(BLOCKS)


def blocks(kind: str, *shape: int) -> np.ndarray:
    """Any bytes, with small scales."""
    numbers, nbytes = BLOCKS[kind]
    rng = np.random.default_rng(len(kind) + sum(shape))
    raw = rng.integers(0, 256, (int(np.prod(shape)) // numbers, nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 118
    elif kind == "IQ1_M":  # bits 12 to 15 of four words: 2^-8
        raw[:, 49:57:2] = raw[:, 49:57:2] & 15 | np.array([0, 0, 0xC0, 0x10], np.uint8)
    else:
        scale = np.float16(1 / 4096)
        for at in HALVES.get(kind, (0,)):
            raw[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return raw.reshape(*shape[:-1], -1)


def tensors(
    table: str, kinds: Sequence[str], experts: int, *, tied: bool
) -> Iterator[tuple[str, np.ndarray, str]]:
    yield "token_embd.weight", blocks(table, VOCABULARY, HIDDEN), table
    ones = np.ones(HIDDEN, np.float32)
    for layer, kind in enumerate(kinds):
        at = f"blk.{layer}."
        for norm, width in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", 64), ("attn_k", 64)):
            yield f"{at}{norm}_norm.weight", ones[:width], "F32"
        for name, rows in (("q", HIDDEN), ("k", 128), ("v", 128), ("output", HIDDEN)):
            yield f"{at}attn_{name}.weight", blocks(kind, rows, HIDDEN), kind
        router = np.random.default_rng(layer).standard_normal((experts, HIDDEN), np.float32)
        yield f"{at}ffn_gate_inp.weight", router, "F32"
        for name in ("gate", "up", "down"):
            yield f"{at}ffn_{name}_exps.weight", blocks(kind, experts, HIDDEN, HIDDEN), kind
    yield "output_norm.weight", ones, "F32"
    if not tied:
        yield "output.weight", blocks("Q6_K", VOCABULARY, HIDDEN), "Q6_K"


def write_model(
    path: Path, table: str, kinds: Sequence[str] = LAYERS, experts: int = 3, *, tied: bool
) -> Path:
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(HIDDEN)
    words = [chr(ord("A") + n) for n in range(VOCABULARY - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, "AB"])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(0)
    for name, data, kind in tensors(table, kinds, experts, tied=tied):
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def taken_bytes(gpu: str) -> int:
    if gpu == "fake":
        return 0
    from hmt.memory.device import open_device

    device = open_device("0")
    device.empty_cache()
    return device.used_bytes()


@pytest.mark.parametrize("gpu", ["fake", pytest.param("0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("table", "tied"), [("Q6_K", True), ("Q4_0", False)])
def test_steps_of_every_type_are_captured(tmp_path, monkeypatch, gpu, table, tied):
    path = write_model(tmp_path / "all.gguf", table, tied=tied)
    request = hmt.Request(input=[3, 17, 5], max_new_tokens=4, ignore_eos=True)
    told: list[str] = []
    monkeypatch.setattr(
        "hmt.engine.execution.graphs.runner.warn_once", lambda *what: told.append(what)
    )
    options = {"host_memory": "128MiB", "context": 64}
    memory = taken_bytes(gpu) + (256 << 20)
    with hmt.Engine(gpu_memory=memory, gpus=gpu, **options) as engine:
        model = engine.load_model(path)
        found = model.infer(request).token_ids
        captured = model._core.runner.executor.graphs
        assert isinstance(captured, GraphRunner), type(captured)
        assert captured.works and captured.graphs[False] and not told
        assert captured._looks_up, "tokens are looked up by the CPU"
        assert gpu == "fake" or model.prepared.model.dtype is torch.bfloat16
    if gpu == "fake":
        with hmt.Engine(**options) as engine:
            assert found == engine.load_model(path).infer(request).token_ids


@pytest.mark.parametrize("memory", ["14MiB", "15MiB"])
def test_layers_of_several_sizes_have_caches_of_experts(tmp_path, monkeypatch, memory):
    """As files of K types do, which keep more bits of some layers."""
    path = write_model(
        tmp_path / "all.gguf", "Q6_K", ["Q4_K", "Q6_K", "Q4_K", "Q8_0"], 12, tied=True
    )
    prompt = [(5 * n + 3) % VOCABULARY for n in range(40)]
    monkeypatch.setattr(device_store, "_MOST_EXPERTS_TOKENS", 24)
    options = {"host_memory": "128MiB", "context": 64, "activations": "exact"}
    with hmt.Engine(**options) as engine:
        expected = engine.load_model(path).logits(prompt, range(40), prefill=24)
    with hmt.Engine(gpu_memory=memory, gpus="fake", **options) as engine:
        model = engine.load_model(path)
        share, weights = model.plan.device, model._core.memory.on_device.weights
        assert share.expert_slots and share.staging_slots
        backends = weights.moe_backends.by_layer
        assert len(backends) == 4
        assert len({backend._nbytes for backend in backends.values()}) == 3
        found = model.logits(prompt, range(40), prefill=24)
        assert (found - expected).norm() / expected.norm() < 1e-5
        cached, brought, left, _ = weights.moe_backends.counts()
        assert cached and brought + left
    assert engine._ledger.reserved_bytes(Tier.DEVICE) == 0
