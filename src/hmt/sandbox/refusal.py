"""How a role refuses a request."""

from typing import Any


class Refusal(Exception):
    """A request was understood and is refused.

    kind   of refusal, for the program that asked
    more   about it, as JSON
    """

    def __init__(self, kind: str, said: str, **more: Any) -> None:
        super().__init__(said)
        self.kind = kind
        self.more = more
