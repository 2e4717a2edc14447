"""Chat templates: messages to the text that the model was trained on.

Templates come with checkpoints from strangers: `hmt.sandbox.template_rendering` renders them in a
child process that the kernel holds to limits.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, ConfigError, RequestError
from hmt.sandbox import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker
from hmt.text.small_file import read_object, read_text

DEFAULT: Final = "default"  # the template of plain chats, where there are several
TOOL_USE: Final = "tool_use"  # that of chats with tools
_FOLDER: Final = "additional_chat_templates"  # of templates beside chat_template.jinja
_GGUF: Final = "tokenizer.chat_template."  # and a name
# Ends in white space, so that it shows whether the template cuts it off.
_MARK: Final = "\U000f0c05CONTINUED\U000f0c05 "
# A chat of a million tokens, some 5 MB, renders in 30 ms and with 40 MB.
_LONGEST: Final = 32 << 20  # characters
_LIMITS: Final = Limits(memory_bytes=192 << 20, cpu_s=3.0)
_PREPARE: Final = Limits(memory_bytes=512 << 20, cpu_s=20.0)  # importing Jinja


class ChatTemplate:
    """A compiled chat template with the special tokens it may name, such as `bos_token`.

    Renders one chat at a time, in one child process.  Safe for use by several threads.

    names   that the template reads and does not set itself
    """

    names: frozenset[str]

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError where `source` is not a template, or passes a limit."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._sandbox = Sandbox(
            "hmt.sandbox.template_rendering:Templates",
            {"longest": _LONGEST},
            prepare=_PREPARE,
            worker=_LIMITS,
        )
        weakref.finalize(self, self._sandbox.close)
        with self._lock:
            self._compiled()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages`, up to where the assistant's answer begins.

        tools       that may be called, in OpenAI's form
        variables   JSON by name, for the template to read: `enable_thinking`, `reasoning_effort`,
                    ...; they replace special tokens of that name, but neither messages nor tools.
                    Without `add_generation_prompt` it is true

        Raises RequestError for messages without a role, for those the template refuses, and where
        rendering passes a limit of time, memory or length.
        """
        if not messages:
            raise RequestError("a chat needs at least one message; the list is empty")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"message {number} of {len(messages)} has no role; "
                    'write it as {"role": "user", "content": "..."}'
                )
        values: dict[str, Any] = {"documents": None, "add_generation_prompt": True}
        values |= self._special_tokens
        values |= variables or {}
        values |= {"messages": messages, "tools": tools}
        try:
            reply = self._rendered(values)
        except Refused as error:
            raise self._not_rendered(messages, str(error)) from error
        except Ended as error:
            raise self._not_rendered(messages, f"{error}, which no chat template should") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise self._not_rendered(messages, f"they are not JSON ({error})") from error
        return reply.blob.decode("utf-8", "surrogatepass")

    def _rendered(self, values: dict[str, Any]) -> Reply:
        for again in (True, False):
            with self._lock:
                try:
                    return self._compiled().call({"values": values})
                except Lost:  # the process was killed from outside
                    if not again:
                        raise Ended("its process was killed") from None
        raise AssertionError

    def _compiled(self) -> Worker:
        """A worker that has the template."""
        if self._worker is not None and not self._worker.ended:
            return self._worker
        try:
            worker = self._sandbox.fork()
            names: list[str] = worker.call({"source": self._source}).message["names"]
        except Refused as error:
            line = error.more.get("line")
            place = f" in line {line}" if line else ""
            raise CheckpointError(
                f"the checkpoint's chat template is broken{place} ({error}): download "
                "chat_template.jinja or tokenizer_config.json again"
            ) from error
        except (Ended, Lost) as error:
            raise CheckpointError(
                f"the checkpoint's chat template cannot be compiled: {error or 'it was closed'}"
            ) from error
        self._worker, self.names = worker, frozenset(names)
        return worker

    def _not_rendered(self, messages: Sequence[Mapping[str, Any]], why: str) -> RequestError:
        roles = ", ".join(message["role"] for message in messages[:8])
        return RequestError(
            f"the checkpoint's chat template cannot render these {len(messages)} messages "
            f"({roles}): {why}; give the roles and the contents that this model expects"
        )


def template_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name, `DEFAULT` and perhaps others; {} without any.

    From chat_template.jinja and additional_chat_templates/NAME.jinja, or from older places.
    Raises CheckpointError where they cannot be read.
    """
    files = {file.stem: file for file in sorted((folder / _FOLDER).glob("*.jinja"))}
    files[DEFAULT] = folder / "chat_template.jinja"
    texts = {name: read_text(file) for name, file in files.items()}
    if sources := {name: text for name, text in texts.items() if text is not None}:
        return sources
    older = read_object(folder / "chat_template.json")
    stated = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(stated, list):
        entries = [entry for entry in stated if isinstance(entry, dict)]
        stated = {entry.get("name"): entry.get("template") for entry in entries}
    else:
        stated = {} if stated is None else {DEFAULT: stated}
    for name, source in stated.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{folder}: the chat_template is a {type(source).__name__} and not text: download "
                "tokenizer_config.json again"
            )
    return stated


def gguf_template_sources(vocabulary: Mapping[str, Any]) -> dict[str, str]:
    """The same of a GGUF file's metadata."""
    named = {
        key.removeprefix(_GGUF): source
        for key, source in vocabulary.items()
        if key.startswith(_GGUF) and isinstance(source, str)
    }
    source = vocabulary.get("tokenizer.chat_template")
    return {**named, DEFAULT: source} if isinstance(source, str) else named


def read_template(file: Path) -> str:
    """A chat template that the user wrote.  Raises ConfigError where it is none."""
    try:
        source = read_text(file)
        if source is None:
            raise ConfigError(
                f"the chat template {file} cannot be read (it does not exist): give a text file in "
                "Jinja"
            )
        ChatTemplate(source, {})
    except CheckpointError as error:
        raise ConfigError(
            f"the chat template {file} cannot be used ({error.__cause__ or error}): correct it, or "
            "leave it out to use the checkpoint's own"
        ) from error
    return source


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with a mark where the last one ends, so that `cut` finds its end."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{_MARK}"}]


def cut(text: str) -> str:
    """`text`, rendered of messages that are `marked`, up to the end of the last one's content.

    As transformers does it: where the template strips content, so is what goes on.  Raises
    RequestError where the template leaves the content out.
    """
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise RequestError(
            "the chat template leaves out the last message, or a part of it, so that it cannot be "
            "continued: end with a message of the user"
        )
    return before if after.startswith(" ") else before.rstrip()
