"""The tokenizer that a GGUF file describes by its metadata, with llama.cpp's ids."""

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers

from hmt.base.errors import CheckpointError
from hmt.base.log import warn_once
from hmt.text.gguf_vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    read_vocabulary,
)
from hmt.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_AT: Final = "tokenizer.ggml."
_SPACE: Final = "\u2581"
_FOUND_FIRST: Final = (CONTROL, USER_DEFINED, UNKNOWN)
# Bounds of what a file can make this do.  Gemma 3, among the largest vocabularies, has pieces
# of up to 16 characters and 1.4 million in all.
_LONGEST_PIECE: Final = 512
_MOST_CHARACTERS: Final = 16 << 20
# Of tokens that are searched for in texts: the search takes 75 bytes and 1 us for each of their
# characters.  Gemma 3's have 76,000; 32,000 codes for pictures would have a million.
_MOST_SEARCHED: Final = 4 << 20
# Of Phi-3's marks those that keep the spaces behind them.
_PHI3_PLAIN: Final = ("<unk>", "<s>", "<|endoftext|>")
# BOS begins their prompts whatever the file says, as in llama.cpp.
_ALWAYS_BOS: Final = ("gemma4", "granite-embed-multi-311m")


def gguf_tokenizer(
    metadata: Mapping[str, Any], what: str
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and what Hugging Face writes in tokenizer_config.json for it.

    metadata   of the file, by its keys
    what       the file, for messages
    The second result also has "eos_token_ids", all tokens that end an answer, and "literal_tokens",
    the text of those that are written as they are spelled.  Raises MissingFileError where there is
    no tokenizer, CheckpointError where it cannot be understood.
    """
    vocabulary = read_vocabulary(metadata, what)
    try:
        if vocabulary.model == "llama":
            prefixed = bool(metadata.get(f"{_AT}add_space_prefix", True))
            backend, adds_bos = _sentencepiece(vocabulary, prefixed), True
        else:
            rules = _rules(metadata, vocabulary.model, what)
            backend, adds_bos = _byte_pairs(vocabulary, rules), rules.add_bos
            if not vocabulary.merges and metadata.get(f"{_AT}pre") != "kimi-k2":
                raise CheckpointError(f"{what} has no tokenizer.ggml.merges: convert it again")
        backend.add_tokens(_added(vocabulary, metadata))
    except CheckpointError:
        raise
    except Exception as error:  # the package raises nothing more special
        raise CheckpointError(
            f"{what}: its tokenizer of kind {vocabulary.model!r} cannot be made "
            f"({type(error).__name__}: {error}): use another conversion of this model"
        ) from error
    return backend, _tokenizer_config(vocabulary, metadata, adds_bos)


def _rules(metadata: Mapping[str, Any], model: str, what: str) -> PreTokenizer:
    name = "gemma4" if model == "gemma4" else metadata.get(f"{_AT}pre", "")
    if name == "":
        warn_once(
            f"no pre-tokenizer {what}",
            f"{what} does not say how text is split before it becomes tokens; llama.cpp's default "
            "splits it, which few models were trained with: use a newer conversion",
        )
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{what} splits text in the way {name!r} (tokenizer.ggml.pre), which HMT does not "
            f"know; known are {', '.join(sorted(PRE_TOKENIZERS))}: use the safetensors of this "
            "model, or a newer HMT"
        )
    return PRE_TOKENIZERS[name]


def _byte_pairs(vocabulary: GgufVocabulary, rules: PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary.tokens)},
            merges=vocabulary.merges,
            byte_fallback=rules.spaced,
            ignore_merges=rules.ignore_merges,
        )
    )
    backend.pre_tokenizer = rules.build()
    if rules.spaced:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = _sentencepiece_decoder(prefixed=False)
    else:
        backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: GgufVocabulary, prefixed: bool) -> tokenizers.Tokenizer:
    """Pairs are merged in the order of the scores of what they make.

    Of equal scores the smaller id comes first, which is the order in which SentencePiece learned
    them.  llama.cpp takes the pair that is leftmost, so that files whose scores are all equal get
    other ids there, and not those the model was trained with.
    """
    tokens, unknown = vocabulary.tokens, vocabulary.named.get("unk")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=_merges_by_score(vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _sentencepiece_decoder(prefixed)
    return backend


def _sentencepiece_decoder(prefixed: bool) -> decoders.Decoder:
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    return decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    known = set(vocabulary.tokens)
    pieces = [
        (-score, number, token)
        for number, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
        )
        # Special tokens are found in a text before its spaces become U+2581: those that have one
        # are found then, others never.
        if kind not in _FOUND_FIRST or _SPACE in token
    ]
    longest = max((len(token) for _, _, token in pieces), default=0)
    if longest > _LONGEST_PIECE or sum(len(token) for *_, token in pieces) > _MOST_CHARACTERS:
        raise CheckpointError(
            f"the vocabulary has pieces of {longest} characters, or more than {_MOST_CHARACTERS} "
            f"in all; the longest that HMT takes has {_LONGEST_PIECE}: use another conversion"
        )
    return [
        (token[:at], token[at:])
        for _, _, token in sorted(pieces)
        # A run such as === is merged from its left, so that the longer half is there first.
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in known and token[at:] in known
    ]


def _added(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """Tokens that are found in a text before anything else is done with it."""
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    searched = sum(len(token) for token, kind in pairs if kind in _FOUND_FIRST)
    if searched > _MOST_SEARCHED:
        raise CheckpointError(
            f"the vocabulary's control and user-defined tokens have {searched} characters; HMT "
            f"takes {_MOST_SEARCHED}: use another conversion of this model"
        )
    name, pre = (str(metadata.get(key, "")) for key in ("general.name", f"{_AT}pre"))
    phi3 = any(spelling in name.lower() for spelling in ("phi-3", "phi3"))
    return [
        tokenizers.AddedToken(
            token,
            special=kind != USER_DEFINED,
            normalized=False,
            rstrip=phi3 and token not in _PHI3_PLAIN,
            lstrip=token == "<mask>" and pre.startswith("jina-v2"),
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in _FOUND_FIRST
    ]


def _tokenizer_config(
    vocabulary: GgufVocabulary, metadata: Mapping[str, Any], adds_bos: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        f"{name}_token": vocabulary.tokens[number] for name, number in vocabulary.named.items()
    }
    stated = metadata.get(f"{_AT}add_bos_token", adds_bos)
    forced = vocabulary.model == "gemma4" or metadata.get(f"{_AT}pre") in _ALWAYS_BOS
    config["add_bos_token"] = bool(stated) or forced
    config["eos_token_ids"] = sorted(vocabulary.ends)
    config["literal_tokens"] = {
        number: token
        for number, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if kind == USER_DEFINED
    }
    return config
