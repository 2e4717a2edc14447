"""Harmony: how gpt-oss writes and reads, in messages that go to channels.

Format: https://cookbook.openai.com/articles/openai-harmony.  What follows a prompt's
<|start|>assistant is one message or several,

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

whose marks are tokens of their own.  The last mark ends the answer and is not shown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

START, CHANNEL, MESSAGE, END, CONSTRAIN = MARKS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>",
)  # fmt: skip
ENDINGS: Final = ("<|return|>", "<|call|>")  # of answers
FINAL: Final = f"{CHANNEL}final{MESSAGE}"
LEAVE: Final = f"{END}{START}assistant{FINAL}"  # what ends reasoning
BETWEEN: Final = "\n\n"  # messages of one kind


def is_harmony(template: str) -> bool:
    """Whether a chat template writes it."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


def harmony_rules(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A grammar of one call of one of `functions`; marks are tokens, not text.

    functions   names, and schemas of arguments as llguidance takes them
    """
    rules = []
    for number, (name, schema) in enumerate(functions):
        recipient = json.dumps(f"commentary to=functions.{name} ")
        rules.append(
            f'call{number}: {CHANNEL} {recipient} {CONSTRAIN} "json" {MESSAGE} args{number}'
        )
        rules.append(f"args{number}: %json {json.dumps(schema)}")
    choices = " | ".join(f"call{number}" for number in range(len(functions)))
    return "\n".join([f"start: {choices}", *rules])


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as gpt-oss's template takes them.

    It has one call to a message, and calls results by the latest call; and what led to a call it
    takes from `thinking` or from `content`, but not from both.
    """
    found: list[Mapping[str, Any]] = []
    taken: set[int] = set()
    for number, message in enumerate(messages):
        if number in taken:
            continue
        calls = message.get("tool_calls") or []
        if not calls:
            found.append(message)
            continue
        said = [text for text in (message.get("thinking"), message.get("content")) if text]
        plain = {key: value for key, value in message.items() if key != "thinking"}
        for turn, call in enumerate(calls):
            content = "" if turn else BETWEEN.join(said)
            found.append({**plain, "content": content, "tool_calls": [call]})
            for at in _results(messages, number, call) if len(calls) > 1 else ():
                taken.add(at)
                found.append(messages[at])
    return found


def _results(messages: Sequence[Mapping[str, Any]], number: int, call: Any) -> Iterator[int]:
    """Where results of `call` in message `number` are, among those that follow at once."""
    wanted = call.get("id") if isinstance(call, Mapping) else None
    for at in range(number + 1, len(messages)):
        if messages[at].get("role") != "tool":
            return
        if wanted is not None and messages[at].get("tool_call_id") == wanted:
            yield at


def harmony_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools as the template takes them: each with a description."""
    return [{**tool, "function": {"description": "", **tool.get("function", {})}} for tool in tools]
