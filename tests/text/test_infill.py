"""Prompts for what stands between two texts, beside transformers' CodeLlamaTokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import CodeLlamaTokenizer

from hmt.base.errors import RequestError
from hmt.text import Tokenizer
from hmt.text.infill import infill_of, stated_ids

PIECES = [
    "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581",
    *"abdefinrtu(:)x+1", "de", "re", "in", "ret", "rn", "\u2581de", "\u2581ret", "tu", "retu",
]  # fmt: skip
MERGES = [("d", "e"), ("r", "e"), ("i", "n"), ("re", "t"), ("r", "n"), ("\u2581", "de"),
          ("\u2581", "ret"), ("t", "u"), ("re", "tu")]  # fmt: skip
MARKS = ["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>"]
VOCABULARY = {piece: number for number, piece in enumerate([*PIECES, *MARKS])}
TEXTS = st.text("adefinrtu(:)x+1 \n\u00e4", max_size=20)


def code_llama(folder: Path, *, older: bool) -> Tokenizer:
    """Of Code Llama's kind; `older`: the space before texts is its normalizer's work."""
    backend = tokenizers.Tokenizer(
        models.BPE(VOCABULARY, MERGES, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    if older:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *MARKS])
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.open(folder)


@pytest.mark.parametrize("older", [True, False], ids=["normalizer", "metaspace"])
def test_code_llamas_prompts_equal_transformers(tmp_path: Path, older: bool) -> None:
    ours = code_llama(tmp_path, older=older)
    theirs = CodeLlamaTokenizer(vocab=VOCABULARY, merges=MERGES)
    theirs.set_infilling_processor(False)
    # The class keeps the space before texts where it is the pre-tokenizer's, and its document
    # says that there is none.
    theirs.backend_tokenizer.pre_tokenizer = None

    @settings(max_examples=100, deadline=None)
    @given(TEXTS, TEXTS)
    def equal(before: str, after: str) -> None:
        wanted = theirs.backend_tokenizer.encode(before, after).ids
        assert ours.infill_prompt(before, after) == wanted

    equal()
    assert ours.encode("x")[1:] != ours.infill_prompt("x", "")[2:3]  # which has no space before it
    assert VOCABULARY["\u2581<EOT>"] in ours.infill.ends


def byte_level(folder: Path, names: list[str], **config: Any) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", *names])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    return Tokenizer.open(folder)


# How their own documents write a prompt, P and S standing for prefix and suffix.
FAMILIES = {
    "qwen": (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
             "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"),
    "starcoder": (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
                  "<fim_prefix>P<fim_suffix>S<fim_middle>"),
    "deepseek": (["<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581begin\uff5c>",
                  "<\uff5cfim\u2581end\uff5c>"],
                 "<\uff5cfim\u2581begin\uff5c>P<\uff5cfim\u2581hole\uff5c>S<\uff5cfim\u2581end\uff5c>"),
    "codestral": (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]S[PREFIX]P"),
    "seed-coder": (["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
                   "<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>"),
}  # fmt: skip


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_written_as_each_family_documents(
    tmp_path: Path, family: str, bos: bool
) -> None:
    names, document = FAMILIES[family]
    tokenizer = byte_level(tmp_path, names, add_bos_token=bos)
    before, after = "def f(\u00e4):\n", "\n    return x"
    wanted = tokenizer.encode(
        document.replace("P", before).replace("S", after)
        if family != "codestral"
        else f"[SUFFIX]{after}[PREFIX]{before}"
    )
    assert tokenizer.infill_prompt(before, after) == wanted
    assert (wanted[0] == tokenizer._backend.token_to_id("<s>")) == bos


def test_a_vocabulary_without_marks_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"no tokens for filling in the middle.*leave the suffix"
    ):
        byte_level(tmp_path, ["<|fim_prefix|>", "<|fim_suffix|>"]).infill_prompt("a", "b")


def test_a_gguf_file_says_which_tokens_it_has() -> None:
    said = {"tokenizer.ggml.fim_pre_token_id": 7, "tokenizer.ggml.suffix_token_id": 8,
            "tokenizer.ggml.fim_mid_token_id": 9, "tokenizer.ggml.fim_pad_token_id": 10,
            "tokenizer.ggml.fim_rep_token_id": 99}  # fmt: skip
    found = infill_of(lambda name: None, stated_ids(said, 20))
    assert found is not None and found.prompt([1], [2]) == [7, 1, 8, 2, 9]
    assert found.ends == {7, 8, 9, 10}
    assert infill_of(lambda name: None, stated_ids({}, 20)) is None
