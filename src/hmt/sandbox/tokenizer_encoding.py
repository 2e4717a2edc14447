"""Encoding with a tokenizer of unknown parts, in a child process."""

from array import array
from typing import Any

import tokenizers


class Encoders:
    """A role: made of a tokenizer.json, it encodes texts."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        self._backend = tokenizers.Tokenizer.from_str(blob.decode())
        # Merged words are not kept, as in HMT's own process: see `hmt.text.tokenizer`.
        resize = getattr(self._backend.model, "_resize_cache", None)
        if resize is not None:
            resize(0)

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """{"special"}: the ids of the text `blob`, as uint32, with special tokens or without."""
        text = blob.decode()
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=message["special"])
        return {}, array("I", encoded.ids).tobytes()
