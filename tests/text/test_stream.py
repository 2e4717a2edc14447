"""Streamed text equals the text of all tokens, and stop strings do not depend on the cutting."""

import re
from collections.abc import Iterable
from importlib.resources import files

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from hmt.base.errors import CheckpointError, RequestError
from hmt.text import StopStrings, TextStream, Tokenizer
from hmt.text.stream import REPLACEMENT, joiner_for

BYTE_LEVEL = Tokenizer.open(str(files("hmt") / "embedded" / "mini-dense"))
EXAMPLES = "Grüße, 世界! 👩‍👩‍👧‍👦 नमस्ते \U0001f1eb\U0001f1f7 e\u0301 \x00\r\n\t end"
ANY_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(EXAMPLES)), max_size=40
)


def sentencepiece(strip: bool) -> tokenizers.Tokenizer:
    """Llama 2's kind of tokenizer (with `strip`) or Gemma's: text pieces, else one byte each."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz世é", "▁t", "th", "he", "▁th", "▁▁"]
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "h"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Tokenizer]:
    opened = {}
    for strip in (True, False):
        folder = tmp_path_factory.mktemp("sentencepiece")
        sentencepiece(strip).save(str(folder / "tokenizer.json"))
        opened[strip] = Tokenizer.open(folder)
    return opened


def streamed(stream: TextStream, ids: Iterable[int]) -> list[str]:
    return [stream.push(token_id) for token_id in ids] + [stream.flush()]


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The parts make up the full text, and none shows half a character."""
    parts = streamed(tokenizer.stream(), ids)
    full = tokenizer.decode(ids)
    assert "".join(parts) == full
    if REPLACEMENT not in full:
        assert not any(REPLACEMENT in part for part in parts)
    return parts


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT)
@example("a<|begin|>b<|end|><|end")
def test_byte_level_text_streams_and_returns(text: str) -> None:
    """All of it, but for what reads like a special token, which counts as one."""
    ids = BYTE_LEVEL.encode(text)
    parts = assert_streams(BYTE_LEVEL, ids)
    assert "".join(parts) == re.sub("|".join(map(re.escape, BYTE_LEVEL_SPECIAL)), "", text)
    assert parts[-1] == ""  # whole characters are never held back


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=30))
def test_any_byte_level_tokens_stream(ids: list[int]) -> None:
    assert_streams(BYTE_LEVEL, ids)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=16))
def test_any_bytes_stream(data: bytes) -> None:
    """Single-byte tokens, so that every kind of invalid UTF-8 occurs and characters are cut."""
    assert_streams(BYTE_LEVEL, [BYTE_LEVEL_BYTES[byte] for byte in data])


def byte_level_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(
        str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json")
    )


def byte_tokens() -> list[int]:
    """The token of each byte: those whose piece is one character, by GPT-2's order of bytes."""
    backend = byte_level_backend()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(0x100 + number) for number, byte in enumerate(others)}
    return [backend.token_to_id(characters[byte]) for byte in range(256)]


BYTE_LEVEL_BYTES = byte_tokens()
BYTE_LEVEL_SPECIAL = [
    token.content
    for token in byte_level_backend().get_added_tokens_decoder().values()
    if token.special
]


def test_a_character_of_four_tokens_appears_with_the_last() -> None:
    ids = [BYTE_LEVEL_BYTES[byte] for byte in "👍".encode()]
    assert streamed(BYTE_LEVEL.stream(), ids) == ["", "", "", "👍", ""]
    assert streamed(BYTE_LEVEL.stream(), ids[:3]) == ["", "", "", REPLACEMENT]


def test_special_tokens_give_no_text() -> None:
    (end,) = BYTE_LEVEL.eos_ids
    smile = [BYTE_LEVEL_BYTES[byte] for byte in "é".encode()]
    assert streamed(BYTE_LEVEL.stream(), [end, smile[0], end, smile[1]]) == ["", "", "", "é", ""]


@settings(max_examples=200, deadline=None)
@given(ANY_TEXT, st.booleans())
def test_sentencepiece_text_streams_and_returns(
    fallback: dict[bool, Tokenizer], text: str, strip: bool
) -> None:
    assume(not any(special in text for special in ("<unk>", "<s>", "</s>")))
    ids = fallback[strip].encode(text)
    parts = assert_streams(fallback[strip], ids)
    assert "".join(parts) == text.replace("▁", " ")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 299),  # anything
            st.sampled_from([3 + byte for byte in "é👍\n".encode()]),  # near valid UTF-8
            st.sampled_from([259, 290, 291]),  # spaces, which may be stripped
        ),
        max_size=16,
    ),
    st.booleans(),
)
def test_any_sentencepiece_tokens_stream(
    fallback: dict[bool, Tokenizer], ids: list[int], strip: bool
) -> None:
    assert_streams(fallback[strip], ids)


def test_a_run_of_byte_tokens_waits_for_its_end(fallback: dict[bool, Tokenizer]) -> None:
    a = fallback[False].encode("a")
    ids = [3 + byte for byte in "é".encode()]
    assert streamed(fallback[False].stream(), ids + a) == ["", "", "éa", ""]
    assert streamed(fallback[False].stream(), [*ids, 3 + 0xFF, *a])[-2] == 3 * REPLACEMENT + "a"


def test_unknown_decoders_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no decoder"):
        joiner_for(None)
    with pytest.raises(CheckpointError, match="WordPiece"):
        joiner_for({"type": "WordPiece", "prefix": "##", "cleanup": True})
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    joiner_for({"type": "Sequence", "decoders": steps})
    ends = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    with pytest.raises(CheckpointError, match=r"ByteFallback \+ Fuse \+ Strip"):
        joiner_for({"type": "Sequence", "decoders": [*steps, ends]})


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read on until some stop string is complete; the longest such is meant."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=5), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_the_text_however_it_is_cut(parts: list[str], stops: list[str]) -> None:
    expected, stop = cut_at_stop("".join(parts), stops)
    cutter = StopStrings(stops)
    shown = ""
    for part in parts:
        shown += cutter.push(part)
        assert expected.startswith(shown)
    assert shown + cutter.flush() == expected
    assert cutter.matched == stop
    assert cutter.push("more") + cutter.flush() == ("" if stop else "more")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    cutter = StopStrings(["\n\nUser:"])
    assert [cutter.push(part) for part in ("Hi.", "\n", "\n", "Us", "ual", "\n\nUser: x")] == [
        "Hi.",
        "",
        "",
        "",
        "\n\nUsual",
        "",
    ]
    assert cutter.matched == "\n\nUser:"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["x", ""])


@settings(max_examples=200, deadline=None)
@given(ANY_TEXT, st.booleans())
def test_the_bytes_of_tokens_make_up_the_text(
    fallback: dict[bool, Tokenizer], text: str, strip: bool
) -> None:
    """Special tokens by their names; what a sentencepiece puts in front is a byte of its own."""
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()
    assume(not any(special in text for special in ("<unk>", "<s>", "</s>", "▁")))
    ids = fallback[strip].encode(text)
    said = b"".join(map(fallback[strip].token_bytes, ids))
    assert said == (b" " if strip and text else b"") + text.encode()
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size + 5) == b""
