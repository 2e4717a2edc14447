"""How long a model reasons before it answers: what clients say of it, in its template's words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hmt.base.log import warn_once
from hmt.text import Tokenizer

# Names by which templates switch reasoning on and off: of Qwen3, GLM, SmolLM3; of DeepSeek V3.1 and
# Granite.
_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
# Words that few templates know, and the nearest that all do.
_NEAREST: Final[Mapping[str, str]] = {
    "none": "low", "minimal": "low", "xhigh": "high", "max": "high",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a chat template is told, and the most tokens of reasoning; None: no limit."""

    variables: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


def thinking(
    tokenizer: Tokenizer,
    *,
    effort: str | None = None,
    on: bool | None = None,
    limit: int | None = None,
    tools: bool = False,
) -> Thinking:
    """How a model is told how long to reason.

    effort  OpenAI's word, from "none" to "max"; None: as the template says
    on      whether to reason at all; None: as `effort` or the template says
    limit   the most tokens of reasoning; None: not said
    tools   whether there are tools, for which there may be another template

    Templates with a switch are told to use it.  Where there is none, a model that may not reason
    has a limit of 0.  An effort that the template has no place for has no effect, which the log
    says once.
    """
    if effort is not None and on is None:
        on = effort != "none"
    if effort is None and on is None:
        return Thinking(limit=limit)
    reads = tokenizer.template_reads(tools=tools)
    told: dict[str, Any] = {name: on for name in _SWITCHES if name in reads}
    if on is False and not told and tokenizer.thinks:
        limit = 0
    if effort is not None and _EFFORT in reads:
        known = tokenizer.template_says(effort, tools=tools)
        told[_EFFORT] = effort if known else _NEAREST.get(effort, effort)
    elif effort not in (None, "none") and not told:
        warn_once(
            "effort", "the chat template has no place for reasoning_effort, which has no effect"
        )
    return Thinking(told, limit)
