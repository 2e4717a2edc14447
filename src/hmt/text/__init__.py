"""Tokenizer, chat templates, and text as it becomes printable."""

from hmt.text.grammar import Constraint, Grammars
from hmt.text.stream import StopStrings, TextStream
from hmt.text.tokenizer import Tokenizer

__all__ = ["Constraint", "Grammars", "StopStrings", "TextStream", "Tokenizer"]
