"""Who is told how answers went."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hmt.server.generation import ChoiceState


class Observer(Protocol):
    """Counts what it is told; on the event loop."""

    def ended(self, choice: "ChoiceState") -> None:
        """An answer has ended, failed, or was cancelled."""
        ...
