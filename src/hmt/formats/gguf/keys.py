"""Metadata of a GGUF file, read with the checks that a stranger's file needs."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError

_REQUIRED: Final = object()


class Keys:
    """Metadata of one architecture, by keys without its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, what: str) -> None:
        self._metadata, self._at, self._what = metadata, f"{architecture}.", what

    def __contains__(self, key: str) -> bool:
        return self._at + key in self._metadata

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A number; of an array whose items are equal, the item.

        Raises HeaderError for what is no number and without a default, CheckpointError for an array
        of different items.
        """
        value = self._metadata.get(self._at + key, default)
        if value is _REQUIRED:
            raise HeaderError(
                f"{self._what} has no {self._at}{key}: convert it again with a current llama.cpp"
            )
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise CheckpointError(
                    f"{self._what} has {self._at}{key} that differs by layer, which HMT does not "
                    "compute"
                )
            value = value[0]
        if value is not default and type(value) not in (int, float):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no number")
        return value

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """A whole number above 0.  Raises as `number`."""
        value = self.number(key, default)
        if value is not default and (type(value) is not int or not 0 < value < 1 << 31):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}; wanted is a count")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so.  Raises HeaderError."""
        value = self._metadata.get(self._at + key, default)
        if not isinstance(value, bool):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no truth")
        return value

    def text(self, key: str) -> str:
        """Text, empty where the file has none.  Raises HeaderError."""
        value = self._metadata.get(self._at + key, "")
        if not isinstance(value, str):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no text")
        return value

    def below(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Keys that begin so, without it, and their values."""
        at = self._at + prefix
        for key, value in self._metadata.items():
            if key.startswith(at):
                yield key.removeprefix(at), value

    def unread(self, key: str, why: str = "") -> CheckpointError:
        """The error for a key that would change the model's numbers and is not computed."""
        value = self._metadata.get(self._at + key)
        reason = why or "which HMT does not compute for this architecture"
        return CheckpointError(f"{self._what} has {self._at}{key} {value!r:.60}, {reason}")
