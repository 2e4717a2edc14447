"""Tokenizer, chat templates, and text as it becomes printable."""

from hmt.text.channels import HarmonyReader
from hmt.text.chat_template import read_template
from hmt.text.documents import documents
from hmt.text.grammar import Constraint
from hmt.text.reasoning import ReasoningReader, ThoughtLimit
from hmt.text.stream import StopStrings, TextStream
from hmt.text.tokenizer import Tokenizer
from hmt.text.tool_calls.dialects import ToolStyle
from hmt.text.tool_calls.parser import CallReader, ToolCall, whole_calls
