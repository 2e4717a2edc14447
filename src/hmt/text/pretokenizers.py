"""How a GGUF file's tokenizer.ggml.pre splits text before byte pairs are merged.

One table for every name that llama.cpp knows (llama-vocab.cpp, as of llama-cpp-python 0.3.36).  The
ids are llama.cpp's, also where its rules differ from the model's own tokenizer.json:
- kimi-k2: a run of letters ignores upper and lower case, and combining marks are punctuation;
- tiny_aya, youtu: upper and lower case letters are one class;
- afmoe, tiny_aya: the first group of a run of digits stays with the text before it, until a later
  step splits it off;
- afmoe: the range that begins with U+F900 begins with U+8C48, to which an editor normalised it.
tests/text/test_gguf_pretokenizers.py compares each name with what llama.cpp answered.
"""

import re
from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import pre_tokenizers

# Characters of Unicode 16, which the regular expressions of `tokenizers` know; llama.cpp's tables
# are of Unicode 15.1 and take them for unassigned.
_UNICODE_16: Final = re.sub(
    r"\w+",
    r"\\x{\g<0>}",
    "897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F "
    "10EC2-10EFC 11380-113E2 116D0-116E3 11BC0-11BF9 11F5A 13460-143FA 16100-16139 16D40-16D79 "
    "18CFF 1CC00-1CEB3 1E5D0-1E5FF 1F8B2-1F8C1 1FA89-1FA8F 1FABE 1FAC6 1FADC-1FADF 1FAE9 "
    "1FBCB-1FBEF",
).replace(" ", "")
_CATEGORY: Final = re.compile(r"\\p\{(?:[LMNPS]|LC)\}")

# Steps that no single regular expression can do, see `_splits`.
_GROUPS_OF_THREE: Final = "digits in groups of three from the right"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What one name stands for.

    steps           regular expressions, each of which splits the pieces of the one before into
                    its matches and what lies between them
    ignore_merges   a piece that is a token is that token, whatever the merges say
    add_bos         BOS begins a text where the file does not say otherwise
    spaced          spaces are U+2581 and characters are themselves or bytes such as <0x0A>, as in
                    SentencePiece; else characters are bytes in GPT-2's alphabet
    """

    steps: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    spaced: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The same as the `tokenizers` package has it."""
        splits = [split for step in self.steps for split in _splits(step)]
        if not self.spaced:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(splits)


def _splits(step: str) -> list[pre_tokenizers.PreTokenizer]:
    if step != _GROUPS_OF_THREE:
        return [_split(step)]
    # 12345 -> 12 345.  Anchored and possessive, because (?=(\p{N}{3})*(?!\p{N})) at each group
    # takes time with the square of the run's length.
    return [
        _split(r"\p{N}+", "merged_with_previous"),
        _split(r"\A[^\p{N}]*+\p{N}{1,2}(?=(?>(?:\p{N}{3})*)\z)"),
        _split(r"\A[^\p{N}]++\p{N}{3}|\p{N}{3}"),
    ]


def _split(pattern: str, behaviour: str = "isolated") -> pre_tokenizers.PreTokenizer:
    known = _CATEGORY.sub(lambda name: f"[{name[0]}&&[^{_UNICODE_16}]]", pattern)
    return pre_tokenizers.Split(tokenizers.Regex(known), behavior=behaviour)


_SHORT: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # it's, we'll
_LINES: Final = r"\s*[\r\n]+"
_BLANK: Final = r"\s+(?!\S)|\s+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_PATHS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANK}"
_LLAMA3: Final = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_BLANK}"
_QWEN2: Final = rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_BLANK}"
_QWEN35: Final = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_BLANK}"
)
_JAIS2: Final = (
    rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|"
    + "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8"))
    + r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s"
)


def _cased(mark: str, short: str, digits: str) -> str:
    """Words that begin with capitals; letters outside ASCII count as either case."""
    upper, lower = rf"[\p{{L}}{mark}&&[^a-z]]", rf"[\p{{L}}{mark}&&[^A-Z]]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{upper}*{lower}+{short}|{lead}{upper}+{lower}*{short}"
        f"|{digits}|{_SIGNS_AND_PATHS}|{_LINES}|{_BLANK}"
    )


_TEKKEN: Final = _cased("", "", r"\p{N}")
_GPT4O: Final = _cased("", f"{_SHORT}?", r"\p{N}{1,3}")
_GRANITE: Final = _cased(r"\p{M}", f"{_SHORT}?", r"\p{N}{1,3}")


def _caseless(digits: str) -> str:
    """The same with letters and marks in one class."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SHORT}?"
        rf"|{digits}|{_SIGNS_AND_PATHS}|{_LINES}|{_BLANK}"
    )


_ASCII_SIGNS: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS: Final = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3: Final = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_BLANK}"
_KANA_AND_HAN: Final = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# Without U+3000 and its like: llama.cpp lets ranges in which spaces lie match none of them.
_EAST: Final = r"[[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]&&[^\s]]+"
# Cased letters in the blocks that deepseek-llm's own list goes through.
_DEEPSEEK_LETTERS: Final = (
    r"[\p{LC}&&[\x{41}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13FD}\x{1C90}-\x{2184}\x{2C00}-\x{2CF3}"
    r"\x{A640}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104FB}"
    r"\x{10C80}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]]"
)
_DEEPSEEK_SIGNS: Final = (
    r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]"
)
_BLOOM: Final = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_HAN: Final = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}"
    r"\x{2F800}-\x{2FA1F}"
)
_KIMI: Final = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SHORT}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_BLANK}"
)
_AFMOE_SCRIPTS: Final = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{1100}-\x{11FF}]+"
)
_YOUTU_SCRIPTS: Final = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
    r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|" + _KANA_AND_HAN
)
_DEFAULT: Final = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")
_RUNS_OF_LINES: Final = r"[^\n]+|\n+"

_KINDS: Final[dict[str, PreTokenizer]] = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo"
    " jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe": (
        PreTokenizer((_GPT2,))
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (
        PreTokenizer((r"\p{N}", _GPT2))
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}|{_BLANK}"),
        ignore_merges=True,
    ),
    "jais-2": PreTokenizer((_JAIS2,)),
    "stablelm2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2": (
        PreTokenizer((_QWEN2,))
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_BLANK}",)),
    "laguna": PreTokenizer((_RUNS_OF_LINES, _QWEN2)),
    "seed-coder": PreTokenizer(
        (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_LINES}|{_BLANK}",)
    ),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}"
            rf"|\s*[\r\n]|{_BLANK}",
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_BLANK}",
        )
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((_GROUPS_OF_THREE, _caseless(r"\p{N}{1,3}"))),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _caseless(r"\p{N}")), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            rf"\s?{_DEEPSEEK_SIGNS}+",
            r"(?<!\s)\s++\z",  # looks behind, or a run of spaces takes time with its square
            _EAST,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _KANA_AND_HAN,
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANK}",
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenizer((_GROUPS_OF_THREE, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": PreTokenizer(
        # Of its pieces runs of newlines alone can be tokens that no merges lead to.
        (_RUNS_OF_LINES,), ignore_merges=True, add_bos=True, spaced=True,
    ),
    "sarvam-moe": PreTokenizer((_RUNS_OF_LINES,), spaced=True),
}  # fmt: skip

PRE_TOKENIZERS: Final = {name: kind for names, kind in _KINDS.items() for name in names.split()}
