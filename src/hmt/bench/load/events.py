"""Server-sent events, as their bytes come in."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """The data of events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    Bytes may be cut anywhere, also inside of a character or of a line's end.  Comments and other
    fields are left out.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of all events that these bytes complete, in order."""
        self._rest += received
        events, begin = [], 0
        for found in _LINE_END.finditer(self._rest):
            if found.end() == len(self._rest) and found.group() == b"\r":
                break  # perhaps half of \r\n
            line = self._rest[begin : found.start()].decode("utf-8", "replace")
            begin = found.end()
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        self._rest = self._rest[begin:]
        return events
