"""Tokens that end an answer by what they are called, whatever a checkpoint says of them.

llama.cpp's list (llama-vocab.cpp): converters often name one end token and leave others out, or
type them as ordinary ones.
"""

from collections.abc import Mapping
from typing import Final

END_TEXTS: Final = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
# Code models write these behind the piece that was asked for.  A file may name its own by the key.
FILE_ENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def end_tokens(ids: Mapping[str, int], stated: Mapping[str, int]) -> frozenset[int]:
    """Ids of a GGUF vocabulary's tokens that end an answer.

    ids      of all tokens, by text
    stated   what the file names: "eos", "eot", "eom" and the keys of FILE_ENDS
    """
    ends = {ids[text] for text in END_TEXTS if text in ids}
    ends |= {stated[name] for name in ("eos", "eot", "eom") if name in stated}
    for name, texts in FILE_ENDS.items():
        ends |= {stated[name]} if name in stated else {ids[text] for text in texts if text in ids}
    ends -= {ids[text] for text in _inside_answers(ids) if text in ids}
    if "<|tool_response>" in ids or ids.get("<|plamo:eos|>") in ends:
        ends.discard(ids.get("</s>", -1))  # an ordinary word of Gemma 4 and PLaMo
    return frozenset(ends)


def ends_of_turns(template: str, special: Mapping[str, int]) -> frozenset[int]:
    """Ids of `special` tokens that end an answer by their text, and that a chat template writes.

    For folders: a base model's config.json may know of its <|endoftext|> only, while the template
    of the tuned one ends messages with another token.
    """
    inside = _inside_answers(special)
    return frozenset(
        special[text]
        for text in END_TEXTS
        if text in special and text in template and text not in inside
    )


def _inside_answers(ids: Mapping[str, int]) -> tuple[str, ...]:
    """Texts that end only a part of an answer: gpt-oss's and Solar's channels."""
    called = "<|call|>" in ids or "<|calls|>" in ids
    parts = called and ("<|return|>" in ids or "<|flush|>" in ids)
    return ("<|end|>",) if parts else ()
