"""Checkpoints as others write them: bare models, wrappers' names, heads beside a tie.

Beside transformers, which loads the same numbers under its own names.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

import hmt
from hmt.base.errors import CheckpointError, RequestError
from hmt.engine import EngineConfig
from hmt.engine.loading import packs
from hmt.engine.loading.inspection import inspect

TOKENS = [7, 31, 200, 9, 15, 77, 3]
SIZES = {
    "vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 12},
    "phi3": {"original_max_position_embeddings": 64},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 64},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
}
Tensors = Mapping[str, torch.Tensor]
WRAPPERS = ["module.", "_orig_mod.", "base_model.model.", "language_model."]


def make(kind: str, folder: Path, *, tied: bool) -> None:
    """A random checkpoint as transformers writes it."""
    torch.manual_seed(3)
    fields = {**SIZES, **KINDS[kind], "tie_word_embeddings": tied}
    if kind in ("gpt2", "gpt_neox"):
        fields.pop("num_key_value_heads")
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape)
            tensor.copy_(tensor + 0.3 * noise if "norm" in name or "ln" in name else 0.2 * noise)
    model.save_pretrained(folder)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)


def rewrite(
    folder: Path, tensors: Callable[[Tensors], Tensors], config: Mapping[str, Any] | None = None
) -> None:
    """Change the tensors, and fields of the configuration; None removes one."""
    file = folder / "model.safetensors"
    changed = tensors({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file(dict(changed), file, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | dict(config or {})
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))


@torch.inference_mode()
def theirs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def ours(folder: Path) -> torch.Tensor:
    with hmt.Engine(host_memory="128MiB", dtype="float32") as engine:
        return engine.load_model(folder).logits(TOKENS, range(len(TOKENS)))


def embedded(folder: Path) -> torch.Tensor:
    with hmt.Engine(host_memory="128MiB", dtype="float32") as engine:
        model = engine.load_model(folder)
        answer = model.infer(hmt.Request(TOKENS, 0, embedding="last"))
        assert answer.embedding is not None
        return torch.as_tensor(answer.embedding)


def bare(tensors: Tensors) -> Tensors:
    """As the model without its output layer is saved."""
    short = {n: t for n, t in tensors.items() if not n.startswith(("lm_head.", "embed_out."))}
    return {name.partition(".")[2]: tensor for name, tensor in short.items()}


@pytest.mark.each_once
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_wrappers_are_seen_through(kind: str, tied: bool, tmp_path: Path) -> None:
    make(kind, tmp_path, tied=tied)
    wanted = theirs(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for front in WRAPPERS:
        rewrite(tmp_path, lambda _, front=front: {front + n: t for n, t in whole.items()})
        assert inspect(tmp_path).extra == ()
        torch.testing.assert_close(ours(tmp_path), wanted, atol=1e-4, rtol=0)


def test_a_language_model_inside_a_larger_one_is_found(tmp_path: Path) -> None:
    make("qwen3", tmp_path, tied=False)
    wanted = theirs(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        },
    )
    torch.testing.assert_close(ours(tmp_path), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("names", ["bare", "whole"])
@pytest.mark.parametrize("architectures", [None, ["Qwen3Model"], ["Qwen3ForCausalLM"]])
def test_a_tied_bare_model_answers(
    architectures: list[str] | None, names: str, tmp_path: Path
) -> None:
    """As Qwen3-Embedding is published."""
    make("qwen3", tmp_path, tied=True)
    wanted = theirs(tmp_path)
    change = bare if names == "bare" else dict
    rewrite(tmp_path, change, {"architectures": architectures})
    torch.testing.assert_close(ours(tmp_path), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_a_bare_model_without_a_head_gives_embeddings_only(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path, tied=False)
    rewrite(tmp_path, bare)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        last = model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    torch.testing.assert_close(embedded(tmp_path), last / last.norm(), atol=1e-5, rtol=0)
    with hmt.Engine(host_memory="128MiB", dtype="float32") as engine:
        loaded = engine.load_model(tmp_path)
        for asked in (
            lambda: loaded.infer(hmt.Request(TOKENS, 4)),
            lambda: loaded.infer(hmt.Request(TOKENS, 0, prompt_logprobs=0)),
            lambda: loaded.beam_search(hmt.Request(TOKENS, 4), 2),
            lambda: loaded.logits(TOKENS, [0]),
        ):
            with pytest.raises(RequestError, match=r"no output layer.*only embeddings"):
                asked()
    with pytest.raises(CheckpointError, match="no output layer"):
        packs.convert(tmp_path, tmp_path / "pack", EngineConfig.resolve(host_memory="64MiB"))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "olmo2"])
def test_a_head_beside_a_tie_is_the_head(kind: str, tmp_path: Path) -> None:
    """As in transformers: also where the embedding is not in the file."""
    make(kind, tmp_path, tied=True)
    tied = theirs(tmp_path)
    [table] = [n for n in load_file(tmp_path / "model.safetensors") if "embed_t" in n or "wte" in n]

    def with_head(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": torch.randn(tensors[table].shape)}

    rewrite(tmp_path, with_head)
    wanted = theirs(tmp_path)
    assert float((wanted - tied).abs().max()) > 1
    torch.testing.assert_close(ours(tmp_path), wanted, atol=1e-4, rtol=0)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t[table].clone()})
    torch.testing.assert_close(ours(tmp_path), tied, atol=1e-4, rtol=0)
    rewrite(tmp_path, lambda t: {n: tensor for n, tensor in t.items() if n != table})
    torch.testing.assert_close(ours(tmp_path), theirs(tmp_path), atol=1e-4, rtol=0)


def test_names_that_fit_nothing_are_told(tmp_path: Path) -> None:
    make("qwen3", tmp_path, tied=False)
    rewrite(tmp_path, lambda tensors: {f"x.{n}.y": t for n, t in tensors.items()})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight.*begin with x\. \(2\d"):
        ours(tmp_path)


def test_a_missing_head_of_a_whole_model_is_missed(tmp_path: Path) -> None:
    make("qwen3", tmp_path, tied=False)
    rewrite(tmp_path, lambda t: {n: tensor for n, tensor in t.items() if n != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"head.* needs tensor lm_head\.weight"):
        ours(tmp_path)
