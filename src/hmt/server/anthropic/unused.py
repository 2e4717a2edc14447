"""Fields of Anthropic's API that are not used here: ignored, or refused and why.

Source: the types of the `anthropic` package (2.12), those of its beta included.
"""

from collections.abc import Mapping
from typing import Final

from hmt.server.fields import Refusal, reasons

_CACHED: Final = {"cache_control": "prompts are cached as --prefix-cache says"}
_SERVERS: Final = "the server itself runs no tools: offer tools that the client runs"

# Of messages, and of what a message would have in tokens.
IGNORED: Final[Mapping[str, str]] = {
    **_CACHED,
    **reasons(
        "tells Anthropic who asks and who pays",
        ("metadata", "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"),
    ),
    **reasons(
        "chooses among Anthropic's models and places",
        ("inference_geo", "speed", "fallbacks", "service_tier"),
    ),
    "diagnostics": "the prefix cache is in /metrics",
    "context_management": "what the client sends is the prompt: nothing is cleared",
    **reasons("the header anthropic-beta has no effect either", ("betas", "anthropic_beta")),
    "anthropic_version": "is in the header",
}

REFUSED: Final[Mapping[str, Refusal]] = {
    "container": Refusal(_SERVERS),
    "mcp_servers": Refusal(_SERVERS),
    "compaction": Refusal("the server does not summarise: send the messages that shall count"),
    "max_tokens_to_sample": Refusal("write max_tokens"),
    "max_completion_tokens": Refusal("write max_tokens"),
    "prompt": Refusal("write messages"),
    "stop": Refusal("write stop_sequences"),
    "n": Refusal("there is one answer", (1,)),
    "extra_body": Refusal("write its fields at the top level"),
    **dict.fromkeys(
        ("response_format", "structured_outputs"), Refusal("write output_config, with a format")
    ),
    "reasoning_effort": Refusal("write output_config, with an effort"),
}

BLOCK_IGNORED: Final[Mapping[str, str]] = {
    **_CACHED,
    **reasons(
        "tells of an answer what its text already has",
        ("citations", "caller", "toolset_name", "index"),
    ),
}

TURN_IGNORED: Final[Mapping[str, str]] = {
    **_CACHED,
    **reasons(
        "tells of an answer what its text already has",
        ("id", "type", "model", "usage", "container", "stop_reason", "stop_sequence",
         "stop_details", "diagnostics"),
    ),
}  # fmt: skip

TURN_REFUSED: Final[Mapping[str, Refusal]] = {
    "clear_at": Refusal("messages are shown as they are sent: leave it out", ("never",)),
    "output_config": Refusal("write it beside the messages", ({},)),
}

TOOL_IGNORED: Final[Mapping[str, str]] = {
    **_CACHED,
    "defer_loading": "all tools are offered at once",
    "eager_input_streaming": "a call comes whole",
    "input_examples": "no chat template has a place for it",
}
