"""Long texts in pieces: the same ids as at once, and a bound on how many there are at least."""

import json
import random
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hmt.base.errors import ContextLengthError, RequestError
from hmt.cli.options import embedded_model
from hmt.text import Tokenizer
from hmt.text.patterns import GPT2, O200K, cl100k
from hmt.text.pieces import PIECE_CHARACTERS, Coverage, Divider

SCRAPS = (
    "the", "don't", "I'LL", "x's", "'s", "Grüße", "naïve", "e\u0301", "\u212b", "слово",
    "你好。世界\uff0c", "ひらがな", "カタカナ", "한국어", "ﷺ", "123", "4567", "0", "½", "٣",
    " ", "  ", "\n", "\r\n", "\t", "\u00a0",
    "\u3000", ".", ",", "!?", "...", "'", "''", "_", "-", "<|x|>", "<|begin|>", "a<pad>b", "[MASK]",
    "\U0001f600", "\u200d", "/", "//\n", "A", "ABC", "aB", "\x00", "\x1c", "`", "\u1fef", "{", "}",
)  # fmt: skip
PATTERNS = {
    "gpt2": GPT2, "o200k": O200K, "qwen": cl100k(r"\p{N}"), "llama3": cl100k(r"\p{N}{1,3}"),
    "cl100k": cl100k(r"\p{N}+"),
}  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(SCRAPS, k=chance.randint(1, 250))) for _ in range(count)]


def byte_level(
    steps: pre_tokenizers.PreTokenizer, normalizer: object = None
) -> tokenizers.Tokenizer:
    """A BPE tokenizer that was trained on the scraps, with added tokens of every kind."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = steps
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts(300, 1), trainer)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [AddedToken("<|x|>", special=True), AddedToken("[MASK]", lstrip=True),
         AddedToken("<pad>", rstrip=True), AddedToken("the 123", normalized=True),
         AddedToken("ABC", single_word=True)]
    )  # fmt: skip
    return made


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # fmt: skip


BACKENDS = {
    "embedded": lambda: tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json")),
    "digits first": lambda: byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "NFC": lambda: byte_level(split_by(PATTERNS["qwen"]), normalizers.NFC()),
}
BACKENDS |= {
    name: (lambda p=pattern: byte_level(split_by(p))) for name, pattern in PATTERNS.items()
}


@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_have_the_ids_of_the_whole(name: str) -> None:
    """Against the same tokenizer, given the whole text at once."""
    backend = BACKENDS[name]()
    divider = Divider.of(backend)
    assert divider is not None
    divided = 0
    for text in texts(150, 2):
        pieces = list(divider.pieces(text, size=24))
        assert "".join(pieces) == text
        divided += len(pieces) > 1
        ids = [
            id_ for piece in pieces for id_ in backend.encode(piece, add_special_tokens=False).ids
        ]
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
    assert divided > 100  # else nothing was shown


def test_what_is_not_known_to_be_divisible_is_not_divided() -> None:
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True)
    strange = split_by(r"\w+ \w+|.")
    removed = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)]
    )
    for steps in (prefixed, strange, removed, pre_tokenizers.Metaspace()):
        assert Divider.of(byte_level(steps)) is None
    assert Divider.of(byte_level(split_by(GPT2), normalizers.NFKC())) is None
    random_merges = byte_level(split_by(GPT2))
    random_merges.model.dropout = 0.1
    assert Divider.of(random_merges) is None


@pytest.mark.parametrize("name", BACKENDS)
def test_no_text_has_fewer_tokens_than_its_bytes_say(name: str) -> None:
    backend = BACKENDS[name]()
    coverage = Coverage.of(backend)
    assert coverage is not None
    longest = sorted(backend.get_vocab(), key=len)[-20:]
    cases = texts(150, 3) + [backend.decode(backend.encode(piece).ids) * 9 for piece in longest]
    cases += [" " * 999 + "[MASK]" + " " * 999, "<pad>" + "\n" * 999, "\u1fef" * 99, "각" * 99]
    for text in cases:
        count = len(backend.encode(text, add_special_tokens=False).ids)
        assert count >= coverage.least_tokens(text), text


def test_nfc_makes_text_a_third_at_least() -> None:
    """By Unicode's own data: the factor that the bound takes."""
    for code in range(0x110000):
        text = chr(code)
        if unicodedata.decomposition(text) or 0xAC00 <= code < 0xD7A4:
            for longer in (text, unicodedata.normalize("NFD", text)):
                shorter = unicodedata.normalize("NFC", longer)
                assert 3 * len(shorter.encode()) >= len(longer.encode()), hex(code)


def test_there_is_no_bound_where_text_may_be_left_out() -> None:
    removed = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    assert Coverage.of(byte_level(removed)) is None
    for normalizer in (normalizers.Strip(), normalizers.Replace("a", ""), normalizers.NFKC(),
                       normalizers.Replace(Regex(" +"), " "), normalizers.NFKD()):  # fmt: skip
        assert Coverage.of(byte_level(split_by(GPT2), normalizer)) is None
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert Coverage.of(words) is None
    assert Coverage.of(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))) is None


def test_sentencepiece_with_bytes_has_a_bound() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    coverage = Coverage.of(backend)
    assert coverage is not None and not Divider.of(backend)
    for text in texts(50, 4):
        assert len(backend.encode(text).ids) >= coverage.least_tokens(text)


def folder_of(path: Path) -> Path:
    """The embedded tokenizer with a post-processor that adds tokens on both sides."""
    backend = tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 1}), encoding="utf-8")
    return path


def test_long_texts_have_their_special_tokens_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(folder_of(tmp_path))
    text = "Words, and 12 numbers.  " * (3 * PIECE_CHARACTERS // 24)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert tokenizer.encode(text) == whole
    assert tokenizer.encode(text, most=len(whole)) == whole


def test_long_texts_are_refused_without_being_read() -> None:
    tokenizer = Tokenizer.open(embedded_model())
    with pytest.raises(ContextLengthError, match=r"4000000 bytes.*has room for 2048"):
        tokenizer.encode("1" * 4_000_000, most=2048)
    with pytest.raises(ContextLengthError, match=r"more than \d+ tokens.*room for 300000"):
        tokenizer.encode("1" * 4_000_000, most=300_000)
    with pytest.raises(RequestError, match="without a place where it can be divided"):
        tokenizer.encode("a" * 1_200_000)
    assert len(tokenizer.encode("1" * 200_000)) == 200_000
