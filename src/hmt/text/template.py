"""Chat templates: messages to the text that the model was trained on.

Templates come with checkpoints from strangers: `hmt.sandbox.templates` renders them in a child
process that the kernel holds to limits.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, RequestError
from hmt.sandbox import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker
from hmt.text.small_file import read_object, read_text

# A chat of a million tokens, some 5 MB, renders in 30 ms and with 40 MB.
_LONGEST: Final = 32 << 20  # characters
_LIMITS: Final = Limits(memory_bytes=192 << 20, cpu_s=3.0)
_PREPARE: Final = Limits(memory_bytes=512 << 20, cpu_s=20.0)  # importing Jinja


class ChatTemplate:
    """A compiled chat template with the special tokens it may name, such as `bos_token`.

    Renders one chat at a time, in one child process.  Safe for use by several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError where `source` is not a template, or passes a limit."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._sandbox = Sandbox(
            "hmt.sandbox.templates:Templates",
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
        effort: str | None = None,
    ) -> str:
        """The text of `messages`, up to where the assistant's answer begins.

        tools    that may be called, in OpenAI's form
        effort   how long to reason; None: as the template says

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
        asked = {} if effort is None else {"reasoning_effort": effort}
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **asked,
        }
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
                except Lost:  # somebody has killed the process, or it was too large beside others
                    if not again:
                        raise Ended("its process was killed") from None
        raise AssertionError

    def _compiled(self) -> Worker:
        """A worker that has the template."""
        if self._worker is not None and not self._worker.ended:
            return self._worker
        try:
            worker = self._sandbox.fork()
            worker.call({"source": self._source})
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
        self._worker = worker
        return worker

    def _not_rendered(self, messages: Sequence[Mapping[str, Any]], why: str) -> RequestError:
        roles = ", ".join(message["role"] for message in messages[:8])
        return RequestError(
            f"the checkpoint's chat template cannot render these {len(messages)} messages "
            f"({roles}): {why}; give the roles and the contents that this model expects"
        )


def template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The checkpoint's chat template: from chat_template.jinja, an older place, or None.

    Raises CheckpointError where it cannot be read.
    """
    source: Any = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    older = read_object(folder / "chat_template.json")
    source = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several by name; "default" is the one for plain chats
        entries = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(
            f"{folder}: the chat_template is a {type(source).__name__} and not text: download "
            "tokenizer_config.json again"
        )
    return source
