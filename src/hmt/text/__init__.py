"""Tokenizer, chat templates, and text as it becomes printable."""

from hmt.text.calls import CallReader, ToolCall, whole_calls
from hmt.text.channels import HarmonyReader
from hmt.text.grammar import Constraint
from hmt.text.reasoning import ReasoningReader, ThoughtLimit
from hmt.text.stream import StopStrings, TextStream
from hmt.text.template import read_template
from hmt.text.tokenizer import Tokenizer
from hmt.text.tools import ToolStyle
