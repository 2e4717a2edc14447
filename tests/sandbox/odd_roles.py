"""A role that does whatever a test asks of it."""

import ctypes
import os
import time
from typing import Any

from hmt.sandbox.refusal import Refusal


class Odd:
    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        self._settings, self._blob = settings, blob
        self._kept: list[bytes] = []
        self._do(settings.get("prepare", ""))

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return {"said": self._do(message["do"])}, blob + self._blob

    def _do(self, what: str) -> Any:
        match what:
            case "environment":
                return dict(os.environ)
            case "loop":
                while True:
                    pass
            case "compute":  # in C, where Python looks at no signal
                return len(str(9**9**8))
            case "sleep":
                time.sleep(600)
            case "allocate":
                return len(bytes(1 << 40))
            case "grow":
                self._kept.append(b"x" * (32 << 20))
            case "overflow":
                ctypes.string_at(0)
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "panic":
                raise BaseException("as Rust's are")
            case "refuse":
                raise Refusal("mine", "no", line=7)
            case "write":
                with open(self._settings["file"], "wb") as file:
                    file.write(b"x" * 100_000)
            case "pid":
                return os.getpid()
        return what
