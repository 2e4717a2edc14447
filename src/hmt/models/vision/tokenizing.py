"""A checkpoint's tokenizer, as transformers' processors of images and text call one.

transformers' AutoTokenizer would read a stranger's files without limits, convert older ones, and
encode with regular expressions that may backtrack for ever.  `hmt.text` reads them instead.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from transformers import BatchEncoding, PreTrainedTokenizerFast
from typing_extensions import override

from hmt.text import Tokenizer


class ProcessorTokenizer(PreTrainedTokenizerFast):
    """transformers' class for what processors ask about tokens.

    It encodes what processors write, where the tokenizer's parts take a known time; else a child
    process does, which does not tell where in the text a token is.
    """

    def __init__(self, own: Tokenizer) -> None:
        """Its backend is a copy of that of `own`."""
        self._own = own
        super().__init__(tokenizer_object=own.backend, **_named(own.about, own.backend))

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, none added.  Raises as `Tokenizer.encode`."""
        return self._own.encode_bare(text)

    @override
    def __call__(self, text: Any = None, *args: Any, **options: Any) -> BatchEncoding:
        if not self._own.confined:
            return super().__call__(text, *args, **options)
        found: Any = self.ids(text) if isinstance(text, str) else [self.ids(one) for one in text]
        ones = [1] * len(found) if isinstance(text, str) else [[1] * len(one) for one in found]
        return BatchEncoding(
            {"input_ids": found, "attention_mask": ones},
            tensor_type=options.get("return_tensors"),
        )


def opened(folder: Path) -> ProcessorTokenizer:
    """The tokenizer in `folder`.  Raises CheckpointError where a file cannot be understood."""
    return ProcessorTokenizer(Tokenizer.open(folder))


def _named(about: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Tokens by their names, such as `image_token`, as far as the vocabulary has them."""
    extra = about.get("extra_special_tokens")
    named: dict[str, Any] = {n: v for n, v in about.items() if n.endswith("_token")}
    if isinstance(extra, Mapping):
        named |= extra
    found = {}
    for name, token in named.items():
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and backend.token_to_id(text) is not None:
            found[name] = text
    return found
