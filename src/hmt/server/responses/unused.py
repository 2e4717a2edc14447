"""Fields of the Responses API that are not used here: ignored, or refused and why.

Sources: the types of the `openai` package (3.54), and what Codex (0.171) sends.
"""

from collections.abc import Mapping
from typing import Final

from hmt.server.fields import Refusal, reasons
from hmt.server.openai.unused import CHAT_REFUSED, IGNORED, REFUSED

_USED: Final = ("metadata", "store", "max_output_tokens", "instructions", "reasoning", "prompt")
_PLAIN: Final = "write input"

BODY_IGNORED: Final[Mapping[str, str]] = {
    **{name: why for name, why in IGNORED.items() if name not in _USED},
    **reasons("tells OpenAI who asks, or what to keep", ("client_metadata", "access_programs")),
    "max_tool_calls": "the server itself runs no tools",
    "context_management": "what the client sends is the prompt: nothing is cleared",
    "image": "images are encoded as large as the model takes them",
    "background_options": "answers are given while the client waits",
}

BODY_REFUSED: Final[Mapping[str, Refusal]] = {
    **{name: refusal for name, refusal in REFUSED.items() if name not in _USED},
    **{
        name: CHAT_REFUSED[name]
        for name in ("audio", "web_search_options", "plugins", "functions", "function_call",
                     "documents", "chat_template", "template", "echo", "add_special_tokens",
                     "reasoning_format", "separate_reasoning", "include_reasoning",
                     "enable_thinking", "thinking", "think")
    },
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refusal("write max_output_tokens")),
    **dict.fromkeys(("messages", "system"), Refusal(_PLAIN)),
    "prompt": Refusal("the server keeps no prompts: write instructions and input"),
    "conversation": Refusal("the server keeps no conversations: write previous_response_id"),
    "background": Refusal("answers are given while the client waits: stream, or wait"),
    "response_format": Refusal("write text, with a format"),
    "reasoning_effort": Refusal("write reasoning, with an effort"),
    "logprobs": Refusal('write top_logprobs, and "message.output_text.logprobs" in include'),
    # "auto" changes nothing of a prompt that fits, and others are refused for their length.
    "truncation": Refusal(
        "prompts are not shortened: send what fits the context", ("disabled", "auto")
    ),
    "n": Refusal("there is one answer", (1,)),
    "best_of": Refusal("there is one answer", (1, 0)),
}  # fmt: skip

# Of items, and of parts of their content.
ITEM_IGNORED: Final[Mapping[str, str]] = {
    **reasons(
        "tells of an item what its content already has",
        ("id", "status", "phase", "caller", "async", "internal_chat_message_metadata_passthrough"),
    ),
}
PART_IGNORED: Final[Mapping[str, str]] = {
    **reasons("tells of an answer what its text already has", ("annotations", "logprobs")),
    "detail": "images are encoded as large as the model takes them",
    "prompt_cache_breakpoint": "prompts are cached as --prefix-cache says",
}

TOOL_IGNORED: Final[Mapping[str, str]] = {
    "defer_loading": "all tools are offered at once",
    "allowed_callers": "the model calls tools itself",
    "output_schema": "no chat template has a place for it",
    "async": "results come with the next request",
}
