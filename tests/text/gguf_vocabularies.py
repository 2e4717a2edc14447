# ruff: noqa: RUF001  (the characters are meant)
"""Vocabularies as GGUF files have them, texts that take them apart, and what llama.cpp answers.

Run as a program it asks llama.cpp (llama-cpp-python) for the ids of 400 texts by every name of a
pre-tokenizer, and writes them to gguf_golden.json.gz, which needs no llama.cpp:

    python tests/text/gguf_vocabularies.py
"""

import gzip
import json
import random
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

GOLDEN = Path(__file__).with_name("gguf_golden.json.gz")
COUNT = 400
AT = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACED = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
# Type by text; spelled as DeepSeek, Qwen, Gemma and others spell theirs.
MARKS = {
    "<|begin|>": CONTROL,
    "<｜User｜>": CONTROL,
    "<｜Assistant｜>": CONTROL,
    "<｜end▁of▁sentence｜>": NORMAL,  # llama.cpp knows it by its text
    "<think>": USER_DEFINED,
    "世界は": USER_DEFINED,
    "   \n": USER_DEFINED,
    "<é>": USER_DEFINED,
    "▁<go>": CONTROL,
    "<unk>": UNKNOWN,
}
UNMERGED = ("helloWorld", "McDonald", "HELLO", "they", "123", "ĠHello", "...ĊĊ", "ĠĠĠĠĠĠ", "ä¸ĸ")
_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    "\u0660\u0661\u0967\uff11\u00bd\u2167\u2460\U0001d7ce",
    "!\"#%&'()*,-./:;?@[\\]_{}",
    "$+<=>^`|~",
    " ",
    "\n",
    " \t\n\r\u000b\u000c\u0085\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000",
    "àéîõüßſıœžÀÉÎÕÜŒŽǅᾼK",
    "привет Мир αβγ ΑΒΓ",
    "天地玄黃宇宙㐀豈々〇𠀀",
    "ひらがなカタカナー、。「」",
    "한국어ㄱㅎᄀ",
    "สวัสดีไทยเป็นกำ",
    "नमस्ते हिंदी বাংলা",
    "שָׁלוֹם مَرْحَبًا",
    "e\u0301a\u0308\u0345\u20dd\ufe0f",
    "🙂👩‍👩‍👧‍👦🇫🇷✨©™€¥",
    "\x00\x01\x1b\x1f\x7f\u00ad\u200b\u200d\u2060\ufeff\ufffd\ue000",
    "…—–“”‘’«»¡¿،؛۔।",
    "\u0897\u1c89\U00010d50\U0001fae9\U00011f5a\u2427\U00010d40",  # of Unicode 16
    "\u0378\uffff\U000e0001\U00030000\U0010ffff",
)
_WORDS = (
    "the", " The", "Hello", "HELLO", "helloWorld", "McDonald", "I'm", "we'LL", "don't", "it's",
    "they've", "I'd", "'S", "'Re", "x'y", "1.", "\n\n1.", "3.14", "12345", "1234567890", "2024-11",
    "100,000", "a b c", "é e", "http://a.b/c", "\r\n", "\n\n\n", "    ", "  ", "\t\t", " \n ",
    "!!!", "...", "->", "==", "//", "/*", "<sentinel:12>", "IMGIMGABCZ", "()", "word\n", "end. ",
    "!\n", ".\n\n", ")\r\n", "?\n\n\n", ":\n", " 世\n", "9\n",
)  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    """Random texts: characters of all kinds in runs and mixed, words, and special tokens."""
    rng = random.Random(seed)
    return ["".join(_parts(rng)) for _ in range(count)]


def _parts(rng: random.Random) -> Iterator[str]:
    alphabets = rng.sample(_ALPHABETS, rng.randint(1, 5))
    for _ in range(rng.randint(1, 10)):
        match rng.randint(0, 9):
            case 0 | 1 | 2 | 3:
                yield from rng.choices(rng.choice(alphabets), k=rng.randint(1, 7))
            case 4:
                yield rng.choice(rng.choice(_ALPHABETS)) * rng.randint(1, 6)
            case 5 | 6 | 7:
                yield rng.choice(_WORDS)
            case 8:
                yield rng.choice(list(MARKS))
            case _:
                yield chr(rng.choice(_ASSIGNED))


_ASSIGNED = [n for n in range(0x110000) if unicodedata.category(chr(n)) not in ("Cs", "Cn", "Co")]


def learned_merges(spaced: bool) -> list[list[str]]:
    """Pairs that cross every border at which text may be split, from texts of the same kind."""
    corpus = texts(6000, seed=1)
    if spaced:
        backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
        corpus = [line for text in corpus for line in text.replace(" ", "▁").splitlines()]
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    else:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=3000, limit_alphabet=700, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [pair for pair in merges if not set("".join(pair)) & set(" \n\0")]


def byte_pairs(
    pre: str,
    merges: Iterable[Iterable[str]],
    more: Mapping[str, int] | None = None,
    **ids: str,
) -> dict[str, Any]:
    """Metadata of a vocabulary of byte pairs; of `SPACED` names in SentencePiece's alphabet.

    more   tokens beside MARKS, and their types
    ids    tokens that the file names, such as eos="</s>"
    """
    pairs = [tuple(pair) for pair in merges]
    if pre in SPACED:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet += ["\n", "\n\n", *sorted({one for pair in pairs for one in "".join(pair)})]
    else:
        # Behind the alphabet words that no merges lead to, for which some names make an exception.
        alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *UNMERGED]
    kinds = {token: BYTE if token.startswith("<0x") else NORMAL for token in alphabet}
    kinds |= {"".join(pair): NORMAL for pair in pairs}
    kinds |= MARKS | dict(more or {})
    tokens = list(kinds)
    named = {"bos": "<|begin|>", "eos": "<｜end▁of▁sentence｜>", **ids}
    return {
        "general.architecture": "llama",
        f"{AT}model": "gpt2",
        f"{AT}pre": pre,
        f"{AT}tokens": tokens,
        f"{AT}token_type": list(kinds.values()),
        f"{AT}merges": [" ".join(pair) for pair in pairs],
        **{f"{AT}{name}_token_id": tokens.index(token) for name, token in named.items()},
    }


def sentencepiece(merges: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: the earlier a pair was learned, the better.

    It names no ids, as some files do not.
    """
    plain = byte_pairs("gemma4", merges)
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    kinds |= dict(zip(plain[f"{AT}tokens"], plain[f"{AT}token_type"], strict=True))
    tokens = [token for token in kinds if token not in ("\n", "\n\n")]
    return {
        "general.architecture": "llama",
        f"{AT}model": "llama",
        f"{AT}tokens": tokens,
        f"{AT}token_type": [kinds[token] for token in tokens],
        f"{AT}scores": [float(-number) for number in range(len(tokens))],
    }


_MAYBE_ENDS = (
    "<|im_end|> <|im_start|> <|end_of_text|> <|endoftext|> [EOS] [EOT] </s> <s> <eos> <EOT> "
    "_<EOT> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <turn|> "
    "<end_of_turn> <start_of_turn> <end_of_utterance> <|tool_response> [e~[ <|END|> <eot> "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|> <|fim_prefix|> <|channel|> <|message|>"
)
# Tokens and their types, and which ids the file names, by what is asked.
END_CASES: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    **{
        text: ({text: (NORMAL, USER_DEFINED, CONTROL)[number % 3]}, {})
        for number, text in enumerate(_MAYBE_ENDS.split())
    },
    "harmony": (dict.fromkeys(("<|return|>", "<|call|>", "<|end|>"), CONTROL), {}),
    "half of harmony": (dict.fromkeys(("<|return|>", "<|end|>"), CONTROL), {}),
    "solar": (dict.fromkeys(("<|flush|>", "<|calls|>", "<|end|>"), CONTROL), {}),
    "gemma 4": (dict.fromkeys(("<|tool_response>", "</s>", "<turn|>"), CONTROL), {}),
    "plamo": ({"</s>": CONTROL, "<|plamo:eos|>": CONTROL}, {"eos": "<|plamo:eos|>"}),
    "plamo's by name only": ({"</s>": CONTROL, "<|plamo:eos|>": CONTROL}, {}),
    "named": (
        {"<a>": CONTROL, "<b>": NORMAL, "<c>": NORMAL, "<|fim_pad|>": CONTROL},
        {"eot": "<a>", "eom": "<b>", "fim_pad": "<c>", "eos": "<think>"},
    ),
}


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        match value:
            case _ if key == "general.architecture":
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class LlamaCpp:
    """llama.cpp's reading of a vocabulary."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        import llama_cpp

        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "vocabulary.gguf", metadata)
            self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self._api = llama_cpp
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=True, special=True)
        return ids

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(self.piece(token_id) for token_id in ids)

    def piece(self, token_id: int) -> bytes:
        """What it writes; nothing for control tokens."""
        api = self._api
        buffer = api.ctypes.create_string_buffer(256)
        length = api.llama_token_to_piece(self._vocabulary, token_id, buffer, 256, 0, False)
        return bytes(buffer.raw[:length])

    def ends(self) -> set[int]:
        count = self._api.llama_vocab_n_tokens(self._vocabulary)
        return {n for n in range(count) if self._api.llama_vocab_is_eog(self._vocabulary, n)}


def main() -> None:
    import llama_cpp

    from hmt.text.pretokenizers import PRE_TOKENIZERS

    merges = {str(spaced): learned_merges(spaced) for spaced in (False, True)}
    samples = texts(COUNT, seed=2)
    answers: dict[str, list[list[int]]] = {}
    for name in PRE_TOKENIZERS:
        theirs = LlamaCpp(byte_pairs(name, merges[str(name in SPACED)]))
        answers[name] = [theirs.encode(text) for text in samples]
    theirs = LlamaCpp(sentencepiece(merges["True"]))
    answers["SentencePiece"] = [theirs.encode(text) for text in samples]
    ends = {}
    for case, (more, ids) in END_CASES.items():
        metadata = byte_pairs("gpt-2", [("a", "b")], more, **ids)
        ends[case] = sorted(metadata[f"{AT}tokens"][n] for n in LlamaCpp(metadata).ends())
    rows = []
    for number, text in enumerate(samples):
        distinct = sorted({tuple(ids[number]) for ids in answers.values()})
        rows.append([text, distinct, [distinct.index(tuple(a[number])) for a in answers.values()]])
    content = {
        "llama-cpp-python": llama_cpp.__version__,
        "merges": merges,
        "names": list(answers),
        "rows": rows,
        "ends": ends,
    }
    packed = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    GOLDEN.write_bytes(gzip.compress(packed, 9, mtime=0))


if __name__ == "__main__":
    main()
