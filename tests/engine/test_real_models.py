"""Real models answer real questions, and compute what transformers and llama.cpp do.

They are there where scripts/real-models has fetched them; CI fetches SmolLM2.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import unturned
from real_models import real_model

import hmt
from hmt.engine.loading.source import open_source

CHAT = [{"role": "user", "content": "How many days are there in a week?"}]
# What is asked, how many tokens are waited for, and a word of the answer.  Gemma is the pretrained
# model, which goes on with a text.
QUESTIONS: dict[str, tuple[tuple[Any, int, str], ...]] = {
    "smollm2": (
        ([{"role": "user", "content": "What is the capital of France?"}], 24, "Paris"),
        (CHAT, 12, "7"),
    ),
    "gemma3-270m": (
        ("A week has seven days: Monday, Tuesday,", 2, "Wednesday"),
        ("2 + 2 =", 3, "4"),
    ),
}
TEXTS = (
    "What is the capital of France?",
    "def area(r):\n    return 3.14159 * r ** 2  # in m²\n",
    "  Zwei  Leerzeichen, 12345 Äpfel, 世界 und 🙂.\t\n\n",
)


@pytest.mark.parametrize("name", QUESTIONS)
def test_it_answers_questions(name: str) -> None:
    with hmt.Engine(context=128) as engine:
        model = engine.load_model(real_model(name))
        for question, tokens, word in QUESTIONS[name]:
            answer = model.infer(hmt.Request(question, tokens)).text
            assert word in answer, f"{question}: {answer}"


def test_it_answers_in_a_third_of_its_size() -> None:
    path = real_model("smollm2")
    third = path.stat().st_size // 3
    answers = []
    for options in ({"host_memory": third, "max_prefill_tokens": 64, "max_batch": 1}, {}):
        with hmt.Engine(context=256, **options) as engine:
            model = engine.load_model(path)
            answers.append(model.infer(hmt.Request(CHAT, 8)).token_ids)
            assert ("host_memory" in options) is (model.summary().streamed_bytes > 0)
    assert answers[0] == answers[1]


def transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Of the floats that the `gguf` package makes of a Llama's file."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    read = {
        key.partition(".")[2]: field.contents()
        for key, field in reader.fields.items()
        if key.startswith("llama.")
    }
    heads = {"attn_q": read["attention.head_count"], "attn_k": read["attention.head_count_kv"]}
    config = transformers.LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"].data), hidden_size=read["embedding_length"],
        intermediate_size=read["feed_forward_length"], num_hidden_layers=read["block_count"],
        num_attention_heads=heads["attn_q"], num_key_value_heads=heads["attn_k"],
        rms_norm_eps=read["attention.layer_norm_rms_epsilon"], tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": read["rope.freq_base"]},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, read["block_count"])
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, try_suffixes=(".weight",)) or ""]
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            turned = heads.get(tensor.name.split(".")[-2])
            if turned is not None:
                numbers = unturned(numbers, turned)
            parameter.copy_(torch.from_numpy(numbers.copy()))
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_are_transformers_of_the_same_numbers() -> None:
    path = real_model("smollm2")
    tokens = open_source(path).tokenizer().encode(TEXTS[0])
    with hmt.Engine(context=64, activations="exact", dtype="float32") as engine:
        found = engine.load_model(path).logits(tokens, range(len(tokens)))
    expected = transformers_logits(path, tokens)
    spread = float(expected.std())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * spread)


@pytest.mark.parametrize("name", QUESTIONS)
def test_ids_are_llama_cpps(name: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = real_model(name)
    ours = open_source(path).tokenizer()
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        for text in TEXTS:
            assert ours.encode(text) == theirs.tokenize(text.encode(), special=True)
    finally:
        theirs.close()
