"""The tokenizer that a GGUF file describes by its metadata."""

import json
from collections.abc import Mapping
from typing import Any, Final

import tokenizers

from hmt.base.errors import CheckpointError, MissingFileError

_AT: Final = "tokenizer.ggml."
_CONTROL: Final = 3  # of token_type
_NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS: Final = ("eos", "eot", "eom")
# Control tokens that end an answer wherever a vocabulary has them, as llama.cpp takes them.
_ENDING_TOKENS: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|return|>", "<|call|>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
# Where both of these end answers, as in gpt-oss, <|end|> ends a part of one.
_HARMONY_ENDS: Final = ("<|return|>", "<|call|>")
# Vocabularies of pairs of bytes that want BOS where the file does not say: Llama 3's.
_BEGUN: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3")


def gguf_tokenizer(
    vocabulary: Mapping[str, Any], what: str
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what Hugging Face writes in tokenizer_config.json for it.

    vocabulary   metadata of the file, by its keys
    what         the file, for messages
    The second result also has "eos_token_ids", all tokens that end an answer.  Raises
    MissingFileError where there is no tokenizer, CheckpointError where it cannot be understood.
    """
    tokens = vocabulary.get(f"{_AT}tokens")
    kind = vocabulary.get(f"{_AT}model", "no_vocab")
    if not tokens or kind == "no_vocab":
        raise MissingFileError(
            f"{what} has no tokenizer: convert it again from a folder that has one"
        )
    # Imported here: it takes seconds, and brings modelling code along.
    from transformers.integrations.gguf import convert_gguf_tokenizer

    try:
        given = _as_transformers_wants(vocabulary)
        backend, _ = convert_gguf_tokenizer(vocabulary["general.architecture"], given)
        if vocabulary.get(f"{_AT}pre") in _BEGUN:
            backend.model.ignore_merges = True  # a word that is a token is that token
        return _only(backend, len(tokens)), _tokenizer_config(vocabulary, tokens)
    except Exception as error:  # of many kinds, from several packages
        raise CheckpointError(
            f"{what}: its tokenizer of kind {kind!r} cannot be read ({type(error).__name__}: "
            f"{error}): use another conversion of this model"
        ) from error


def _only(backend: tokenizers.Tokenizer, count: int) -> tokenizers.Tokenizer:
    """`backend` without tokens that the file has not got: transformers' classes bring their own."""
    if backend.get_vocab_size(with_added_tokens=True) <= count:
        return backend
    content = json.loads(backend.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] < count]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _as_transformers_wants(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "tokenizer_type": "model",
        "pre_tokenizer_type": "pre",
        "tokens": "tokens",
        "scores": "scores",
        "token_type": "token_type",
        "merges": "merges",
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "unk_token_id": "unknown_token_id",
        "pad_token_id": "padding_token_id",
        "add_prefix_space": "add_space_prefix",
    }
    return {
        theirs: vocabulary[_AT + name] for theirs, name in names.items() if _AT + name in vocabulary
    }


def _tokenizer_config(vocabulary: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token_id = vocabulary.get(f"{_AT}{key}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    sentencepiece = vocabulary.get(f"{_AT}model") == "llama"
    begun = sentencepiece or vocabulary.get(f"{_AT}pre") in _BEGUN
    config["add_bos_token"] = bool(vocabulary.get(f"{_AT}add_bos_token", begun))
    template = vocabulary.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    ids = {vocabulary.get(f"{_AT}{name}_token_id") for name in _ENDS}
    kinds = vocabulary.get(f"{_AT}token_type") or []
    kinds = kinds if len(kinds) == len(tokens) else [0] * len(tokens)
    pairs = enumerate(zip(tokens, kinds, strict=True))
    control = {token: number for number, (token, kind) in pairs if kind == _CONTROL}
    ids |= {control[token] for token in _ENDING_TOKENS if token in control}
    if all(token in control for token in _HARMONY_ENDS):
        ids.discard(control.get("<|end|>"))
    config["eos_token_ids"] = sorted(n for n in ids if type(n) is int and 0 <= n < len(tokens))
    return config
