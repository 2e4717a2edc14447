"""Turn a folder of plain-text books into tokenizer.json, train.bin, valid.bin and valid.txt.

    python training/prepare.py BOOKS OUT [--tokenizer FILE] [--vocabulary 4096] [--held-out 0.02]

The last part of every book is held out.  The .bin files are bare uint16 token ids.
"""

import argparse
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = [
    "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|tool|>", "<|image|>", "<|pad|>",
]  # fmt: skip
VOCABULARY = 4096
_GUTENBERG = re.compile(r"\*\*\* ?START OF.*?\*\*\*(.*?)\*\*\* ?END OF", re.DOTALL)


def clean(text: str) -> str:
    """A book with one paragraph per line, without Project Gutenberg's frame where it has one."""
    text = text.replace("\r\n", "\n")
    framed = _GUTENBERG.search(text)
    body = framed[1] if framed else text
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", body))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def train_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split(book: str, held_out: float) -> tuple[str, str]:
    """(first part, last part) of a book, cut at the end of a paragraph."""
    cut = book.rfind("\n", 0, int(len(book) * (1 - held_out))) + 1
    return book[:cut], book[cut:]


def main() -> None:
    """Read the books, write the four files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("books", type=Path, help="folder of UTF-8 .txt files")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json, train none")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens to train")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of each book")
    options = parser.parse_args()

    files = sorted(options.books.glob("*.txt"))
    if not files:
        parser.error(f"{options.books} holds no .txt files")
    parts = [split(clean(file.read_text(encoding="utf-8")), options.held_out) for file in files]
    train, valid = ["".join(part) for part in zip(*parts, strict=True)]
    if options.tokenizer:
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
    else:
        tokenizer = train_tokenizer([train], options.vocabulary)

    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out / "tokenizer.json"))
    (options.out / "valid.txt").write_text(valid, encoding="utf-8")
    for name, text in (("train", train), ("valid", valid)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        np.array(ids, np.uint16).tofile(options.out / f"{name}.bin")
        print(f"{name}.bin: {len(ids):,} tokens from {len(files)} books")


if __name__ == "__main__":
    main()
